"""The forms in which a template takes a conversation, found by rendering examples when it is loaded.

What a template does not show is lost without an error, so its source or a refusal alone do not answer these questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from string import ascii_lowercase
from typing import Any, Final

from msgspec import Struct

Message = Mapping[str, Any]
Messages = Sequence[Message]
Render = Callable[[Messages, Messages | None], str | None]
"""Renders an example with these tools; None for one that the template does not accept."""

_NAME: Final = "zqmark"
_VALUE: Final = "zqvalue"
_TEXT: Final = f'{{"{_NAME}": "{_VALUE}"}}'
_CUT: Final = f'{{"{_NAME}": "{_VALUE}'  # as an answer that ended at its length leaves it
# Python's own writing of an object: no model was trained on it, so a template that prints it expected text.
_PYTHON_TEXT: Final = f"{{'{_NAME}': '{_VALUE}'}}"
_ID: Final = "abcdef123"  # of the length that some templates demand
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "An example.",
            "parameters": {"type": "object", "properties": {_NAME: {"type": "string", "description": "An example."}}},
        },
    }
]


class ArgumentForm(Struct, frozen=True):
    """How a template takes the arguments of a call."""

    as_objects: bool = True  # as transformers gives them; False: the template joins them to text
    takes_raw_text: bool = True  # whether arguments that are not an object can be shown as they are


class ContentForm(Struct, frozen=True):
    """The roles whose contents a template reads as a list of parts."""

    parts: frozenset[str] = frozenset()  # it shows each text of a list, and has a place for media
    only_parts: frozenset[str] = frozenset()  # it loses or refuses a content that is a text


def find_content_form(render: Render) -> ContentForm:
    """Return the form for a template; `render` must not change the contents."""
    parts, only_parts = set[str](), set[str]()
    for role in ("user", "system", "assistant", "tool"):
        asked = _parts("text") if "user" in only_parts else "text"
        found = [kinds for tools in (None, _TOOLS) if (kinds := _shown_kinds(render, role, asked, tools))]
        if found and all("parts" in kinds for kinds in found):
            parts.add(role)
        if found and not any("text" in kinds for kinds in found):
            only_parts.add(role)
    return ContentForm(frozenset(parts), frozenset(only_parts))


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_FIRST: Final = f"{_NAME}a"
_SECOND: Final = f"{_NAME}b"
_CONTENTS: Final[Mapping[str, tuple[object, tuple[str, ...]]]] = {  # the kind -> a content, and the texts in it
    "text": (_FIRST, (_FIRST,)),
    "part": (_parts(_FIRST), (_FIRST,)),
    "parts": (_parts(_FIRST, _SECOND), (_FIRST, _SECOND)),
}


def _shown_kinds(render: Render, role: str, asked: object, tools: Messages | None) -> set[str]:
    """Return the kinds of contents that are shown of messages of a role; none where no example is accepted."""
    for before, message, behind in _places_of(role, {"role": "user", "content": asked}):
        kinds = {
            kind
            for kind, (content, texts) in _CONTENTS.items()
            if _is_shown(render([*before, {**message, "content": content}, *behind], tools), texts)
        }
        if kinds:
            return kinds
    return set()


def _places_of(role: str, asked: Message) -> Iterator[tuple[Messages, Message, Messages]]:
    """Make conversations around a message of a role that templates accept."""
    if role != "tool":
        yield [asked] if role == "assistant" else [], {"role": role}, [] if role == "user" else [asked]
        return
    for content in (None, "text"):
        called, result = _call({_NAME: _VALUE}, content), {"role": "tool", "tool_call_id": _ID, "name": "probe"}
        yield [asked, called], result, []
        yield [asked, called], result, [{"role": "assistant", "content": "text"}, asked]


def _call(arguments: object, content: str | None) -> Message:
    call = {"id": _ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _is_shown(shown: str | None, texts: Sequence[str]) -> bool:
    """Return whether the texts stand in a prompt in their order, and not as a list is written in Python or JSON."""
    if shown is None:
        return False
    places = [shown.find(text) for text in texts]
    between = shown[places[0] : places[-1]]
    return -1 not in places and places == sorted(places) and not any(mark in between for mark in ("'type'", '"type"'))


class RoleForm(Struct, frozen=True):
    """Where a template shows the texts of the system: as sent, unless an example was refused or came out incomplete."""

    knows_developer: bool = False  # the role `developer`; else it is the system by another name
    knows_system: bool = True  # False: the family has no such role
    takes_several: bool = True  # further ones right behind the first
    takes_later: bool = True  # ones behind other messages


def find_role_form(render: Render, *, names_developer: bool) -> RoleForm:
    """Return the form for a template; `names_developer`: the role stands in its source."""
    for tools in (None, _TOOLS):

        def shows(*roles: str, tools: Messages | None = tools) -> bool:
            texts = [f"{_NAME}{letter}" for letter in ascii_lowercase[: len(roles)]]
            shown = render([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)], tools)
            return shown is not None and all(text in shown.lower() for text in texts)

        if not shows("user"):
            continue  # refused for another reason
        # A template that prints any role would print this one, which its model has never read.
        knows_developer = names_developer and shows("developer", "user")
        if not shows("system", "user"):
            return RoleForm(knows_developer, knows_system=False, takes_several=False, takes_later=False)
        kinds = ("system", "developer") if knows_developer else ("system",)
        return RoleForm(
            knows_developer,
            takes_several=all(shows(first, second, "user") for first in kinds for second in kinds),
            takes_later=all(
                shows(*before, "user", "assistant", kind, "user") for before in ((), ("system",)) for kind in kinds
            ),
        )
    return RoleForm()


EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The reasoning efforts of requests, in their order."""
_WRITTEN_EFFORTS: Final = frozenset(
    {"low", "medium", "high"}
)  # that families know whose template writes the word itself


def find_efforts(render: Callable[[str | None], str | None], source: str) -> Mapping[str, str | None]:
    """Return what stands in for each effort that a family does not know; None: nothing is given to its template.

    `render` returns the prompt of an example with an effort, or None where it is refused. A template that compares the
    word with those it knows decides by itself about others.
    """
    if "reasoning_effort" not in source:
        return {}
    shown = render(_NAME)
    if shown is None:
        known = frozenset(effort for effort in EFFORTS if render(effort) is not None)
    elif _NAME in shown.lower():
        named = {effort for effort in EFFORTS[1:] if f"'{effort}'" in source or f'"{effort}"' in source}
        known = _WRITTEN_EFFORTS | named
    else:
        return {}
    found: dict[str, str | None] = {
        effort: _nearest(effort, known) for effort in EFFORTS if effort not in known and known
    }
    if shown is None and "none" in found and render(None) is not None:
        found["none"] = None  # the template's own way without reasoning has another name
    return found


def _nearest(effort: str, known: AbstractSet[str]) -> str:
    """Return the effort that is nearest to one; of two the higher."""
    place = EFFORTS.index(effort)
    return min(known, key=lambda other: (abs(EFFORTS.index(other) - place), -EFFORTS.index(other)))


def find_argument_form(render: Render) -> ArgumentForm:
    """Return the form for a template."""
    for tools in (_TOOLS, None):
        for of_object, of_text, of_cut in zip(
            _conversations({_NAME: _VALUE}), _conversations(_TEXT), _conversations(_CUT), strict=True
        ):
            shown, shown_text = render(of_object, tools), render(of_text, tools)
            if shown is None and shown_text is None:
                continue  # refused for another reason than the form of the arguments
            joins_text = shown is None or (_PYTHON_TEXT in shown and _PYTHON_TEXT not in (shown_text or ""))
            as_objects = not joins_text or shown_text is None
            return ArgumentForm(as_objects, takes_raw_text=render(of_cut, tools) is not None)
    return ArgumentForm()


def _conversations(arguments: object) -> Iterator[Messages]:
    """Make the conversations of an earlier call that templates accept; some refuse a null content, or a last tool."""
    for content in (None, "text"):
        asked, called = {"role": "user", "content": "text"}, _call(arguments, content)
        result = {"role": "tool", "tool_call_id": _ID, "name": "probe", "content": "text"}
        yield [asked, called, result]
        yield [asked, called, result, {"role": "assistant", "content": "text"}, asked]

"""The form in which a template takes the arguments of earlier calls, found by rendering an example when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Messages = Sequence[Mapping[str, Any]]

_NAME: Final = "zqmark"
_VALUE: Final = "zqvalue"
_TEXT: Final = f'{{"{_NAME}": "{_VALUE}"}}'
_CUT: Final = f'{{"{_NAME}": "{_VALUE}'  # as an answer that ended at its length leaves it
# Python's own writing of an object: no model was trained on it, so a template that prints it expected text.
_PYTHON_TEXT: Final = f"{{'{_NAME}': '{_VALUE}'}}"
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


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """How a template takes the arguments of a call."""

    as_objects: bool = True  # as transformers gives them; False: the template joins them to text
    takes_raw_text: bool = True  # whether arguments that are not an object can be shown as they are


def find_argument_form(render: Callable[[Messages, Sequence[Mapping[str, Any]] | None], str | None]) -> ArgumentForm:
    """Return the form for a template; `render` returns None for messages that the template does not accept."""
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
        call = {"id": "abcdef123", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        asked = {"role": "user", "content": "text"}
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "abcdef123", "name": "probe", "content": "text"}
        yield [asked, called, result]
        yield [asked, called, result, {"role": "assistant", "content": "text"}, asked]

"""Calls whose body is JSON: an object with a name and arguments, alone or in an array, between tags.

    <tool_call>
    {"name": "search", "arguments": {"query": "rain"}}
    </tool_call>

or arguments alone behind a name:  `<name><separator>{"query": "rain"}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from dynamo.text.formats.call_form import CallForm
from dynamo.text.formats.json_reader import JsonReader
from dynamo.text.formats.scanner import MAX_NAME, NotACall, Scanner, Step
from dynamo.text.formats.tagged_answer import ContentStart
from dynamo.text.formats.tool_set import ToolSet
from dynamo.text.markers import MarkerSearch, search_for

_TEXT: Final = msgspec.json.Decoder(str)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class CallKeys(msgspec.Struct, frozen=True):
    """What the members of a call's object are called. Without a key for the name, it is the key of the arguments."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    only_known: bool = False  # other names are no calls


HERMES_KEYS: Final = CallKeys()


@dataclass(frozen=True, slots=True)
class TaggedJson(CallForm):
    """Objects with name and arguments behind a mark. Any of the closing marks may follow, or none."""

    opening: tuple[str, ...]
    closing: tuple[str, ...] = ()
    keys: CallKeys = HERMES_KEYS
    opens_array: bool = False  # the mark ends in the array's bracket
    separators: str | None = None  # between objects that follow each other without an array; None: there is only one
    frame: tuple[str, ...] = ()  # see `CallForm`
    stray: tuple[str, ...] = ()  # removed where it closes nothing: a closing mark that is a special token

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (*self.opening, *self.closing)

    @property
    def starts(self) -> tuple[str, ...]:
        return self.opening

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        s.take(s.at + len(mark))
        yield from call_objects(
            s, tools, self.keys, is_array=self.opens_array, separators=self.separators, closing=self.closing
        )


@dataclass(frozen=True, slots=True)
class NamedJson(CallForm):
    """A name and its arguments: each call between marks of its own, all of them between an outer pair that may be missing."""

    opening: str
    before_name: str
    behind_name: tuple[str, ...]  # what ends a name
    behind_json: tuple[str, ...] = ()  # what may follow the arguments; ends the call
    outer: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()  # of the outer pair
    fence: tuple[str, str] = ("", "")  # the first comes between name and arguments, the second may follow them
    identify: Callable[[str, ToolSet], tuple[str, str | None]] | None = None  # text -> (name, id), or NotACall

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser; the first begins a call."""
        return (self.opening, *self.outer, self.before_name, *self.behind_name, *self.behind_json, *self.closing)

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.opening, *self.outer)

    @property
    def stray(self) -> tuple[str, ...]:
        return (*self.behind_json, *self.closing)

    def calls(self, s: Scanner, mark: str, tools: ToolSet) -> Step[None]:
        name_end = search_for(*self.behind_name)
        s.take(s.at + len(mark))
        if mark != self.opening:
            yield from s.space()
            yield from s.expect(self.opening)
        while True:
            yield from self._call(s, name_end, tools)
            s.commit()
            follows = yield from s.accept_behind_space(self.opening, *self.closing)
            if follows != self.opening:
                return

    def _call(self, s: Scanner, name_end: MarkerSearch, tools: ToolSet) -> Step[None]:
        yield from s.space()
        if self.before_name:
            yield from s.expect(self.before_name)
        name = (yield from s.until(name_end, limit=MAX_NAME)).strip()
        if not name:
            raise NotACall
        call_id: str | None = None
        if self.identify is not None:
            name, call_id = self.identify(name, tools)
        else:
            name = tools.resolve(name)
        s.out.name = name
        yield from s.expect(*self.behind_name)
        yield from s.space()
        if self.fence[0]:
            yield from s.expect(self.fence[0])
            yield from s.space()
        yield from stream_arguments(s, name, call_id)
        s.out.end()
        s.commit()
        if self.fence[1]:
            yield from s.accept_behind_space(self.fence[1])
        yield from s.accept_behind_space(*self.behind_json)


def call_objects(
    s: Scanner,
    tools: ToolSet,
    keys: CallKeys,
    *,
    is_array: bool = False,
    separators: str | None = None,
    closing: tuple[str, ...] = (),
) -> Step[None]:
    """Read one object, several in an array, or several that follow each other; then a closing mark, if one comes."""
    if not is_array:
        yield from s.space()
        is_array = (yield from s.accept("[")) is not None
    while True:
        yield from s.space()
        yield from call_object(s, tools, keys)
        s.commit()
        if is_array:
            yield from s.space()
            if (yield from s.expect(",", "]")) == "]":
                break
            yield from s.space()
            if (yield from s.accept("]")) is not None:  # a comma behind the last one
                break
        elif separators is None or not (yield from _another(s, separators)):
            break
    if closing:
        yield from s.accept_behind_space(*closing)
    s.commit()


def _another(s: Scanner, separators: str) -> Step[bool]:
    """Read separators in front of another object; nothing, unless one comes."""
    while True:
        end = s.at
        while end < len(s.text) and (s.text[end].isspace() or s.text[end] in separators):
            if (end := end + 1) - s.at > MAX_NAME:
                return False
        if end < len(s.text) or s.is_ended:
            break
        yield
    if s.text[end : end + 1] != "{":
        return False
    s.take(end)
    return True


def call_object(s: Scanner, tools: ToolSet, keys: CallKeys) -> Step[None]:
    """Read one object that is a call, and emit the call as it comes."""
    yield from s.expect("{")
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    is_emitted = False
    while True:
        yield from s.space()
        if (yield from s.peek()) == "}":
            break
        key = _unquoted((yield from s.json_text()))
        yield from s.space()
        yield from s.expect(":")
        yield from s.space()
        if not keys.name:
            if name is not None:
                raise NotACall
            name = s.out.name = _checked(key, tools, keys)
            yield from stream_arguments(s, name, None)
            is_emitted = True
        elif key in keys.name and name is None:
            name = s.out.name = _checked(_unquoted((yield from s.json_text())), tools, keys)
            if early is not None:
                _emit_arguments(s, name, None, early)
                is_emitted = True
        elif key in keys.arguments and early is None and not is_emitted:
            if name is None:
                early = _decoded((yield from s.json_text()))
            else:
                yield from stream_arguments(s, name, None)
                is_emitted = True
        else:
            yield from s.json_text()
        yield from s.space()
        if (yield from s.peek()) != "}":
            yield from s.expect(",")
    yield from s.expect("}")
    if name is None:
        raise NotACall
    if not is_emitted:
        _emit_arguments(s, name, None, "{}")
    s.out.end()


def stream_arguments(s: Scanner, name: str, call_id: str | None) -> Step[None]:
    """Begin the call and emit its arguments as they come; text that spells an object becomes that object."""
    first = yield from s.peek()
    if first == "{":
        s.out.begin(name, call_id)
        yield from s.json(s.out.arguments)
        s.out.has_all_arguments = True
        return
    _emit_arguments(s, name, call_id, _decoded((yield from s.json_text())))


def _emit_arguments(s: Scanner, name: str, call_id: str | None, arguments: str) -> None:
    s.out.begin(name, call_id)
    s.out.arguments(arguments)
    s.out.has_all_arguments = True


def _decoded(arguments: str) -> str:
    """Return the object that arguments are; NotACall when they are none."""
    if arguments == "null":
        return "{}"
    if arguments.startswith("{"):
        return arguments
    inner = _unquoted(arguments)
    try:
        _OBJECT.decode(inner)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise NotACall from None
    return inner


def _checked(name: str, tools: ToolSet, keys: CallKeys) -> str:
    name = tools.resolve(name)
    if not name or (keys.only_known and name not in tools.names):
        raise NotACall
    return name


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        raise NotACall
    try:
        return _TEXT.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        raise NotACall from None


# Output of a forced tool choice: the content as a whole is JSON, because the engine was guided to write nothing else.
#
# An engine that was not guided may write anything. What does not begin as such JSON is read in the model's own format. A
# call had to come, so what there is of one that was cut off is that call.

# How an array of calls, or one, begins before the name of the first is known.
_BEGINNING: Final = re.compile(r'\s*(?:\[\s*)?(?:\{\s*(?:"(?:n(?:a(?:m(?:e(?:"\s*(?::\s*(?:"[^"\\]*)?)?)?)?)?)?)?)?)?')


def required_calls(tools: ToolSet) -> ContentStart:
    """Return what reads an array of calls `{"name", "parameters" or "arguments"}`, or a single one.

    From the first character on that does not fit, everything is content. Where no call came before it the model's own
    format is read from the beginning, because its marks may begin as JSON does (`[TOOL_CALLS]`).
    """

    def start(s: Scanner) -> Step[bool]:
        if not (yield from s.comes(0, "[", "{")):
            return True
        has_called = False

        def goes_on(raw: str) -> int:
            nonlocal has_called
            has_called = s.out.is_behind_call
            if has_called or s.out.is_open:
                return len(raw)
            is_cut_call = s.is_ended and (s.out.name is not None or _BEGINNING.fullmatch(raw) is not None)
            return len(raw) if is_cut_call else 0

        yield from s.attempt(_calls(s, tools), goes_on=goes_on)
        if s.out.is_behind_call:
            yield from _space_at_end(s)
        return not has_called and not s.out.is_behind_call

    return start


def calls_beside_shape(tools: ToolSet) -> ContentStart:
    """Return what reads an array of calls where the answer may as well be JSON of another shape: that is content.

    Only an array is examined, as a shape is nearly always an object.
    """
    read = required_calls(tools)

    def start(s: Scanner) -> Step[bool]:
        if not (yield from s.comes(0, "[")):
            return True
        s.out.keeps_cut_call = True  # from here on a call has to come
        return (yield from read(s))

    return start


def _calls(s: Scanner, tools: ToolSet) -> Step[None]:
    yield from s.space()
    yield from call_objects(s, tools, HERMES_KEYS)


def named_call(name: str) -> ContentStart:
    """Return what reads the arguments of the function that was named.

    They are emitted as they come, once the object has its first key (or is complete without). If it breaks later, what
    follows is content and the call stays without its end. The model's own format may hold calls of other functions:
    `OutputParser` drops them.
    """

    def start(s: Scanner) -> Step[bool]:
        if not (yield from s.comes(0, "{")):
            return True
        has_begun = False

        def goes_on(raw: str) -> int:
            return len(raw) if has_begun else 0

        def arguments() -> Step[None]:
            nonlocal has_begun
            yield from s.space()
            reader, held = JsonReader(), list[str]()

            def emit(text: str) -> None:
                nonlocal has_begun
                held.append(text)
                if not has_begun and (reader.has_key or reader.is_complete):
                    has_begun = True
                    s.out.begin(name)
                if has_begun:
                    s.out.arguments("".join(held))
                    held.clear()

            try:
                yield from s.json(emit, reader)
            except NotACall:
                if s.is_ended and not reader.is_broken and not has_begun:  # cut off
                    has_begun = True
                    s.out.begin(name)
                    s.out.arguments("".join(held))
                if not has_begun:
                    raise
                s.out.leave_open()
                return
            s.out.end()

        yield from s.attempt(arguments(), goes_on=goes_on)
        if s.out.is_behind_call:
            yield from _space_at_end(s)
        return not has_begun

    return start


def _space_at_end(s: Scanner) -> Step[None]:
    """Read the white space behind the last call, which is part of the form unless more text follows."""
    if (yield from s.comes(0, "")):
        yield from s.space()

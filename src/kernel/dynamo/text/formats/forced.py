"""Output of a forced tool choice: the content as a whole is JSON, because the engine was guided to write nothing else.

An engine that was not guided may write anything. What does not begin as such JSON is read in the model's own format. A
call had to come, so what there is of one that was cut off is that call.
"""

from __future__ import annotations

import re
from typing import Final

from dynamo.text.formats.json_calls import HERMES_KEYS, call_objects
from dynamo.text.formats.json_reader import JsonReader
from dynamo.text.formats.scanner import NotACall, Scanner, Step
from dynamo.text.formats.tagged_answer import ContentStart
from dynamo.text.formats.tool_set import ToolSet

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

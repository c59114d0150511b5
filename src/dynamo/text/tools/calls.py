"""From the JSON object of a call to the call."""

from __future__ import annotations

import json
import re

import msgspec

from dynamo.text.output import CallArguments, CallBegan, CallEnded, OutputEvent

__all__ = ["MAX_CALL_CHARACTERS", "call_events", "cut_call_events", "read_call"]

MAX_CALL_CHARACTERS = 1_048_576
"""The longest call that is waited for, in characters. What is longer is content: it would have to be held back whole."""

_NOTHING = msgspec.Raw()
_BEGINNING = re.compile(r"\s*(?:\{\s*(?:\"(?:n(?:a(?:m(?:e(?:\"\s*(?::\s*(?:\"[^\"\\]*)?)?)?)?)?)?)?)?)?")
_KEY = re.compile(r"\s*[{,]\s*\"((?:[^\"\\]|\\.)*)\"\s*:\s*", re.DOTALL)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = _NOTHING
    parameters: msgspec.Raw = _NOTHING


_DECODER = msgspec.json.Decoder(_Call)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = json.JSONDecoder(strict=False)
_TEXT = msgspec.json.Decoder(str)


def read_call(text: str) -> tuple[str, str] | None:
    """Return (name, arguments) of `{"name": ..., "arguments" or "parameters": {...}}`; None for any other object.

    The arguments are a JSON object as the model wrote it; absent or null ones are `{}`. A string that spells an object
    (some models encode twice) counts as that object.
    """
    try:
        call = _DECODER.decode(text)
        arguments = bytes(call.arguments or call.parameters) or b"null"
        if arguments[:1] == b'"':
            inner = _TEXT.decode(arguments)
            _OBJECT.decode(inner)
            return (call.name, inner) if call.name else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if arguments == b"null":
        arguments = b"{}"
    return (call.name, arguments.decode()) if call.name and arguments[:1] == b"{" else None


def call_events(call: tuple[str, str]) -> list[OutputEvent]:
    """Return the events of a complete call."""
    name, arguments = call
    return [CallBegan(name), CallArguments(arguments), CallEnded()]


def cut_call_events(text: str) -> list[OutputEvent] | None:
    """Return what there is of a call whose JSON object was cut off; None when `text` is not the beginning of one.

    A call whose name is not complete yet is nothing. One whose arguments are complete has ended.
    """
    if _BEGINNING.fullmatch(text):
        return []
    members: dict[str, str] = {}
    at, is_cut = 0, False
    while not is_cut and (key := _KEY.match(text, at)) is not None:
        try:
            _, at = _VALUE.raw_decode(text, key.end())
        except (ValueError, RecursionError):
            at, is_cut = len(text), True
        members[key.group(1)] = text[key.end() : at]
        last = key.group(1)
    name = members.get("name", "")
    if len(name) < 3 or not name.startswith('"') or (is_cut and last == "name"):
        return None
    member = "arguments" if "arguments" in members else "parameters"
    arguments = members.get(member, "")
    if arguments and not arguments.startswith("{"):
        return None
    events: list[OutputEvent] = [CallBegan(_TEXT.decode(name))]
    if arguments:
        events.append(CallArguments(arguments))
        if not (is_cut and last == member):
            events.append(CallEnded())
    return events

"""What a model writes whose whole answer is divided by marks: reasoning, text and calls are blocks of one format.

One machine reads all of it, whichever of the two parsers a card names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from dynamo.text.formats.json_calls import CallKeys, call_object, stream_arguments
from dynamo.text.formats.scanner import MAX_NAME, Grammar, NotACall, Scanner, Step
from dynamo.text.formats.tool_set import ANYTHING, Kinds, ToolSet
from dynamo.text.formats.typed_arguments import ArgumentsWriter
from dynamo.text.formats.xml_calls import TaggedXml
from dynamo.text.markers import search_for

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_CONSTRAIN: Final = "<|constrain|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_WORD: Final = re.compile(r"[a-z]+")
_HEADER_WORDS: Final = re.compile(r"\s*\w*(?:\s+(?:to=[^\s<]*|to?$))*")
_MAX_HEADER: Final = 1024  # characters of a header that are examined
_STRING: Final = Kinds(frozenset(["string"]))
_BUILT_IN: Final = re.compile(r"(?:python|browser|container)(?:\.|$)")


class _Header:
    """The beginning of what stands between two marks."""

    __slots__ = ("text",)

    def __init__(self, text: str = "") -> None:
        self.text = text

    def add(self, text: str) -> None:
        """Add a piece; what is too long is left out."""
        self.text += text[: _MAX_HEADER - len(self.text)]


def _behind_words(header: str) -> str:
    """Return what stands in a header without a message behind its first word and its recipients: text of the model."""
    text = header[_HEADER_WORDS.match(header).end() :]  # type: ignore[union-attr]  # it matches anything
    return text if text.strip() else ""


def _nothing(text: str) -> None:
    """Drop text."""


def _emit(s: Scanner, *, reasons: bool) -> Callable[[str], None]:
    """Return what text of the next block becomes."""
    s.out.is_reasoning = reasons
    return s.out.reasoning if reasons else s.out.content


class Harmony(Struct, frozen=True):
    """gpt-oss: messages of a header and a body.

        <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
        <|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "rain"}<|call|>

    Headers are read leniently: the last channel and recipient count, unknown words are ignored. Two messages of reasoning, or
    two of content, are parted by a line break.
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser."""
        return (_CHANNEL, _START, _CONSTRAIN, _MESSAGE, *_ENDS)

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        heads = search_for(*self.marks)

        def answer(s: Scanner) -> Step[None]:
            written: set[bool] = set()  # whether it reasons, of each message that had text
            if (yield from s.comes(0, "to=")):  # the header began in the prompt
                yield from header(s, None, written)
            elif not (yield from s.comes(0, *self.marks, "")):
                written.add(s.out.is_reasoning)
            # Text without a header is content, unless the prompt has begun a message of reasoning.
            emit = _emit(s, reasons=s.out.is_reasoning)
            while (mark := (yield from s.prose(heads, emit))) is not None:
                emit = _emit(s, reasons=False)
                s.take(s.at + len(mark))
                if mark not in _ENDS:
                    yield from header(s, mark, written)

        def header(s: Scanner, mark: str | None, written: set[bool]) -> Step[None]:
            read, text = mark or "", ""

            def add(piece: str) -> None:
                nonlocal text
                if len(text) <= _MAX_HEADER:
                    text += piece
                    piece = _behind_words(text) if len(text) > _MAX_HEADER else ""
                s.out.content(piece)  # so much is no header

            while mark not in (_MESSAGE, *_ENDS):
                mark = yield from s.prose(heads, add)
                is_header = len(text) <= _MAX_HEADER
                if mark is None or mark in _ENDS or not is_header:
                    if is_header and _RECIPIENT.search(read + text) is None:
                        s.out.content(_behind_words(text))
                    if mark in _ENDS:
                        s.take(s.at + len(mark))
                    return
                read, text = (read + text + mark)[-4 * _MAX_HEADER :], ""
                s.take(s.at + len(mark))
            yield from self._body(s, read, tools, written)

        return answer

    def _body(self, s: Scanner, header: str, tools: ToolSet, written: set[bool]) -> Step[None]:
        channel = ""
        for part in header.split(_CHANNEL)[1:]:
            channel = found[0] if (found := _WORD.match(part.strip())) is not None else channel
        recipients = [name for name in _RECIPIENT.findall(header) if name != "assistant"]
        ends = search_for(*_ENDS, _START)
        if recipients and tools.names:
            name = recipients[-1]
            bare = name.removeprefix("functions.")
            if name.startswith("functions.") or bare in tools.names:
                yield from s.attempt(self._call(s, bare))
                yield from s.accept_behind_space(*_ENDS)
                return
            if _BUILT_IN.match(name):
                yield from s.prose(ends, _nothing)
                return
        reasons = channel == "analysis"
        emit = _emit(s, reasons=reasons)
        if not (yield from s.comes(0, *_ENDS, _START, "")):
            if reasons in written:
                emit("\n")
            written.add(reasons)
        yield from s.prose(ends, emit)
        s.out.is_reasoning = False

    def _call(self, s: Scanner, name: str) -> Step[None]:
        s.out.name = name
        yield from s.space()
        if (yield from s.comes(0, *_ENDS, "")):
            if s.is_ended and s.out.is_cut:
                raise NotACall
            s.out.begin(name)
            s.out.arguments("{}")
        else:
            yield from stream_arguments(s, name, None)
        s.out.end()
        s.commit()


class Inkling(Struct, frozen=True):
    """Blocks of a kind that their mark names, each ended by one mark.

    <|message_model|><|content_invoke_tool_json|>{"name": "search", "args": {"query": "rain"}}<|end_message|>
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser."""
        return (
            "<|content_invoke_tool_json|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_text|>",
            "<|content_tool_error|>",
            "<|message_model|>",
            "<|end_message|>",
            "<|content_model_end_sampling|>",
        )

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        every = search_for(*self.marks)
        keys = CallKeys(arguments=("args", "arguments"))

        def call(s: Scanner) -> Step[None]:
            yield from s.space()
            yield from call_object(s, tools, keys)
            s.commit()
            yield from s.accept_behind_space("<|end_message|>")
            s.commit()

        def answer(s: Scanner) -> Step[None]:
            emit = _emit(s, reasons=s.out.is_reasoning)
            while (mark := (yield from s.prose(every, emit))) is not None:
                emit = _emit(s, reasons=False)
                if mark == self.marks[0] and tools.names:
                    yield from s.attempt(self._marked(s, mark, call))
                    continue
                s.take(s.at + len(mark))
                if mark == "<|message_model|>":
                    emit = _nothing  # a name may stand between the mark and its block
                elif mark == "<|content_thinking|>":
                    emit = _emit(s, reasons=True)

        return answer

    def _marked(self, s: Scanner, mark: str, call: Callable[[Scanner], Step[None]]) -> Step[None]:
        s.take(s.at + len(mark))
        yield from call(s)


class Muse(Struct, frozen=True):
    """Messages with a recipient: `self` is reasoning, a tool's name is a call in tags, anything else is text."""

    xml: TaggedXml

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser."""
        return (*self.xml.outer, _START, _MESSAGE, "<|eom|>", "<|eot|>", *self.xml.closing)

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        every = search_for(_START, _MESSAGE, "<|eom|>", "<|eot|>")
        in_tool = search_for(*self.xml.outer, *self.xml.invoke, _START, "<|eom|>", "<|eot|>")

        def answer(s: Scanner) -> Step[None]:
            recipient = "self" if s.out.is_reasoning else ""
            if (yield from s.comes(0, "to=")):  # the prompt ended in <|start|>assistant
                recipient = yield from self._header(s)
            while True:
                emit, search = _emit(s, reasons=recipient == "self"), every
                if tools.names and recipient not in ("", "self", "user", "commentary"):
                    emit, search = _nothing, in_tool
                mark = yield from s.prose(search, emit)
                if mark is None:
                    return
                if mark in self.xml.outer or mark in self.xml.invoke:
                    yield from s.attempt(self.xml.calls(s, mark, tools))
                    continue
                s.take(s.at + len(mark))
                if mark == _START:
                    recipient = yield from self._header(s)
                elif mark != _MESSAGE:
                    recipient = ""

        return answer

    def _header(self, s: Scanner) -> Step[str]:
        """Return the recipient in a header, read up to its end."""
        ends = search_for(_MESSAGE, _START, "<|eom|>", "<|eot|>", "\n\n")
        header = _Header()
        mark = yield from s.prose(ends, header.add)
        if mark is not None and mark not in (_START, "\n\n"):
            s.take(s.at + len(mark))
        found = _RECIPIENT.search(header.text)
        return found[1] if found is not None else "user"


_OPEN: Final = "<|open|>"
_CLOSE: Final = "<|close|>"
_SEP: Final = "<|sep|>"
_END: Final = "<|end_of_msg|>"
_CUT_TAG: Final = re.compile(r'[\w-]*(?: [\w-]*(?:=(?:"[^"\n]*(?:"|\Z))?)?)*(?:<(?:\|(?:s(?:e(?:p\|?)?)?)?)?)?')
_ATTRIBUTE: Final = re.compile(r'([\w-]+)="([^"]*)"')


class KimiK3(Struct, frozen=True):
    """XTML: elements whose tags are made of special tokens.

    <|open|>tools<|sep|><|open|>call tool="search" index="0"<|sep|>
    <|open|>argument key="query" type="string"<|sep|>rain<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
    """

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that must reach the parser."""
        return (_OPEN, _CLOSE, _SEP, _END)

    def grammar(self, tools: ToolSet) -> Grammar:
        """Return the grammar of an answer that may call these tools."""
        every = search_for(_OPEN, _CLOSE, _END)

        def answer(s: Scanner) -> Step[None]:
            emit = _emit(s, reasons=s.out.is_reasoning)
            while (mark := (yield from s.prose(every, emit))) is not None:
                if mark == _END:
                    s.take(s.at + len(mark))
                    continue
                if mark == _OPEN and tools.names and (yield from s.comes(len(mark), "call ")):
                    yield from s.attempt(self._call(s, tools))
                    continue
                kind = yield from self._tag(s, len(mark))
                if kind is None:  # no tag: text
                    if s.is_ended and _CUT_TAG.fullmatch(s.text, s.at + len(mark)) is not None:
                        s.take_cut_mark()
                    emit(s.take(min(s.at + len(mark), len(s.text))))
                else:
                    emit = _emit(s, reasons=mark == _OPEN and kind == "think")

        return answer

    def _tag(self, s: Scanner, offset: int) -> Step[str | None]:
        """Read a tag whose mark is `offset` long; None, and nothing is read, when it is none."""
        while True:
            start = s.at + offset
            most = start + MAX_NAME + len(_SEP)  # no tag is longer, so nothing is searched behind that
            end = s.text.find(_SEP, start, most)
            bad = min((at for stop in ("\n", "<|o", "<|c") if (at := s.text.find(stop, start, most)) >= 0), default=-1)
            if end >= 0 and (bad < 0 or end < bad):
                name = s.text[start:end].split(" ", 1)[0]
                s.take(end + len(_SEP))
                return name
            if bad >= 0 or len(s.text) >= most or s.is_ended:
                return None
            yield

    def _call(self, s: Scanner, tools: ToolSet) -> Step[None]:
        attributes = yield from self._opening(s, "call ")
        name = s.out.name = tools.resolve(attributes.get("tool", ""))
        if not name:
            raise NotACall
        s.out.begin(name)
        arguments = ArgumentsWriter(s.out)
        closing = search_for(f"{_CLOSE}argument{_SEP}")

        def is_end(mark: str) -> Step[bool]:
            return (yield from s.comes(len(mark), _OPEN, _CLOSE, _END, ""))

        while True:
            yield from s.space()
            if (yield from s.accept(f"{_CLOSE}call{_SEP}")) is not None:
                break
            if not (yield from s.peek()) and not s.out.is_cut:
                break
            given = yield from self._opening(s, "argument ")
            key, kind = given.get("key", ""), given.get("type", "string")
            kinds = _STRING if kind == "string" else ANYTHING
            yield from arguments.text_value(s, key, kinds, closing, is_end, reads_json=True)
            yield from s.expect(f"{_CLOSE}argument{_SEP}")
        arguments.end()
        s.commit()

    def _opening(self, s: Scanner, kind: str) -> Step[dict[str, str]]:
        yield from s.expect(_OPEN)
        yield from s.expect(kind)
        text = yield from s.until(search_for(_SEP, "\n"), limit=4 * MAX_NAME)
        yield from s.expect(_SEP)
        return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}

"""The output of one response: items in the order in which they came, and the events that report them.

One item is open at a time: an item of another kind, or the next call, closes it. Streamed or not, the items are written here,
so they are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Literal

import msgspec
from msgspec import Raw, Struct

from dynamo.errors import Unknown
from dynamo.protocol.openai.escaping import json_line, json_text
from dynamo.protocol.responses.events import EventNumbers
from dynamo.protocol.responses.items import pack_reasoning
from dynamo.protocol.responses.tools import CustomInputReader, OfferedTool

Status = Literal["completed", "incomplete"]

_NO_LOGPROBS: Final = b"[]"
_IN_PROGRESS: Final = "in_progress"


class OutputShape(Struct, frozen=True):
    """What a client requested to see."""

    has_summary: bool = False
    packs_reasoning: bool = False
    hides_reasoning: bool = False


class ItemIds:
    """Makes the ids of a response's items: they name the response, so that a store finds an item by its id alone."""

    NUMBER_DIGITS: ClassVar[int] = 5

    __slots__ = ("_next", "_stem")

    def __init__(self, response_id: str, *, first: int = 0) -> None:
        """`response_id`: `resp_` and 32 hexadecimal digits; `first`: the number in the first id."""
        self._stem = response_id.partition("_")[2][: -self.NUMBER_DIGITS]
        self._next = first

    def new(self, prefix: str) -> str:
        number, self._next = self._next, self._next + 1
        return f"{prefix}_{self._stem}{number:0{self.NUMBER_DIGITS}x}"


class _OpenItem(ABC):
    """An item that is being written."""

    def __init__(self, events: EventNumbers, id: str, index: int) -> None:
        self._events, self._id = events, id
        self._index = b'"output_index":%d' % index
        self._place = b'"item_id":%b,%b' % (json_text(id), self._index)

    def begin(self) -> bytes:
        return self._added(self._item(_IN_PROGRESS, begins=True))

    @abstractmethod
    def end(self, status: Status) -> tuple[bytes, bytes]:
        """Return the last events of the item, and the item."""

    @abstractmethod
    def _item(self, status: str, *, begins: bool = False) -> bytes: ...

    def _added(self, item: bytes) -> bytes:
        return self._events.event("response.output_item.added", self._index + b',"item":' + item)

    def _done(self, item: bytes) -> bytes:
        return self._events.event("response.output_item.done", self._index + b',"item":' + item)

    def _event(self, kind: str, members: bytes) -> bytes:
        return self._events.event(kind, self._place + b"," + members)


class _OpenMessage(_OpenItem):
    def __init__(self, events: EventNumbers, id: str, index: int) -> None:
        super().__init__(events, id, index)
        self._text: list[bytes] = []  # JSON strings
        self._logprobs: list[bytes] = []  # JSON arrays without their brackets
        place = self._place + b',"content_index":0,"logprobs":[]'
        self._write = events.repeated("response.output_text.delta", place, b"delta")
        self._keep = self._text.append

    def begin(self) -> bytes:
        part = b'"content_index":0,"part":' + self._part(b'""', _NO_LOGPROBS)
        return super().begin() + self._event("response.content_part.added", part)

    def add(self, piece: bytes, logprobs: bytes | None = None) -> bytes:
        """Return the event of a piece of text, given as JSON, with a JSON array of log probabilities."""
        if logprobs is None:
            self._keep(piece)
            return self._write(piece)
        self._logprobs.append(logprobs[1:-1])
        self._keep(piece)
        return self._event(
            "response.output_text.delta", b'"content_index":0,"logprobs":%b,"delta":%b' % (logprobs, piece)
        )

    def encoder(self) -> Callable[[bytes], bytes]:
        """Return the short way of `add` for pieces without log probabilities."""
        keep, write = self._keep, self._write

        def encode(piece: bytes) -> bytes:
            keep(piece)
            return write(piece)

        return encode

    def end(self, status: Status) -> tuple[bytes, bytes]:
        text, logprobs = _joined(self._text), b"[%b]" % b",".join(self._logprobs)
        self._text[:] = [text]
        done = self._event("response.output_text.done", b'"content_index":0,"text":%b,"logprobs":%b' % (text, logprobs))
        done += self._event("response.content_part.done", b'"content_index":0,"part":' + self._part(text, logprobs))
        item = self._item(status)
        return done + self._done(item), item

    def _item(self, status: str, *, begins: bool = False) -> bytes:
        content = b"[]"
        if not begins:
            content = b"[%b]" % self._part(_joined(self._text), b"[%b]" % b",".join(self._logprobs))
        return b'{"id":%b,"type":"message","status":%b,"role":"assistant","content":%b}' % (
            json_text(self._id),
            json_text(status),
            content,
        )

    @staticmethod
    def _part(text: bytes, logprobs: bytes) -> bytes:
        return b'{"type":"output_text","text":%b,"annotations":[],"logprobs":%b}' % (text, logprobs)


class _OpenReasoning(_OpenItem):
    def __init__(self, events: EventNumbers, id: str, index: int, shape: OutputShape) -> None:
        super().__init__(events, id, index)
        self._shape = shape
        self._text: list[bytes] = []

    def begin(self) -> bytes:
        part = b'"content_index":0,"part":{"type":"reasoning_text","text":""}'
        began = super().begin() + self._event("response.content_part.added", part)
        if self._shape.has_summary:
            part = b'"summary_index":0,"part":{"type":"summary_text","text":""}'
            began += self._event("response.reasoning_summary_part.added", part)
        return began

    def add(self, piece: bytes) -> bytes:
        """Return the events of a piece of text, given as JSON."""
        self._text.append(piece)
        told = self._event("response.reasoning_text.delta", b'"content_index":0,"delta":' + piece)
        if self._shape.has_summary:
            told += self._event("response.reasoning_summary_text.delta", b'"summary_index":0,"delta":' + piece)
        return told

    def end(self, status: Status) -> tuple[bytes, bytes]:
        text = _joined(self._text)
        self._text[:] = [text]
        done = self._event("response.reasoning_text.done", b'"content_index":0,"text":' + text)
        part = b'"content_index":0,"part":{"type":"reasoning_text","text":%b}' % text
        done += self._event("response.content_part.done", part)
        if self._shape.has_summary:
            done += self._event("response.reasoning_summary_text.done", b'"summary_index":0,"text":' + text)
            part = b'"summary_index":0,"part":{"type":"summary_text","text":%b}' % text
            done += self._event("response.reasoning_summary_part.done", part)
        item = self._item(status)
        return done + self._done(item), item

    def _item(self, status: str, *, begins: bool = False) -> bytes:
        summary = content = b"[]"
        packed = b""  # left out where it was not requested: the document of Open Responses does not allow null
        if not begins:
            text = _joined(self._text)
            content = b'[{"type":"reasoning_text","text":%b}]' % text
            if self._shape.has_summary:
                summary = b'[{"type":"summary_text","text":%b}]' % text
            if self._shape.packs_reasoning:
                packed = b'"encrypted_content":%b,' % json_text(pack_reasoning(msgspec.json.decode(text, type=str)))
        return b'{"id":%b,"type":"reasoning","summary":%b,"content":%b,%b"status":%b}' % (
            json_text(self._id),
            summary,
            content,
            packed,
            json_text(status),
        )


class _OpenCall(_OpenItem):
    """A call of a function."""

    def __init__(self, events: EventNumbers, id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(events, id, index)
        self._call_id, self._tool = call_id, tool
        self._arguments: list[str] = []
        self.has_ended = False  # the worker reported that the call is complete

    def add(self, text: str) -> bytes:
        """Return the event of a piece of the arguments; b"" where it is sent later."""
        self._arguments.append(text)
        return self._event("response.function_call_arguments.delta", b'"delta":' + json_text(text))

    def end(self, status: Status) -> tuple[bytes, bytes]:
        told = b""
        if status == "completed" and not "".join(self._arguments).strip():
            told = self.add("{}")  # clients read the arguments as JSON
        members = b'"arguments":%b,"name":%b' % (json_text(self._written), json_text(self._tool.name))
        told += self._event("response.function_call_arguments.done", members)
        item = self._item(status)
        return told + self._done(item), item

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object, so that nothing can follow."""
        try:
            return isinstance(msgspec.json.decode(self._written), dict)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False

    @property
    def settled_status(self) -> Status:
        """The status of a call behind which something else comes."""
        is_bare = self.has_ended and not self._written.strip()  # a call without arguments
        return "completed" if is_bare or self.is_whole else "incomplete"

    @property
    def _written(self) -> str:
        return "".join(self._arguments)

    def _item(self, status: str, *, begins: bool = False) -> bytes:
        return json_line(
            {
                "id": self._id,
                "type": "function_call",
                "status": status,
                "call_id": self._call_id,
                "name": self._tool.name,
                **self._namespace(),
                "arguments": self._written,
            }
        )

    def _namespace(self) -> Mapping[str, str]:
        return {} if self._tool.namespace is None else {"namespace": self._tool.namespace}


class _OpenCustomCall(_OpenCall):
    """A call of a custom tool: its input is the one argument of the function that stands for it."""

    def __init__(self, events: EventNumbers, id: str, index: int, call_id: str, tool: OfferedTool) -> None:
        super().__init__(events, id, index, call_id, tool)
        self._input = CustomInputReader()

    def add(self, text: str) -> bytes:
        self._arguments.append(text)
        return self._delta(self._input.push(text))

    def end(self, status: Status) -> tuple[bytes, bytes]:
        told = self._delta(self._input.finish())
        told += self._event("response.custom_tool_call_input.done", b'"input":' + json_text(self._input.text))
        item = self._item(status)
        return told + self._done(item), item

    def _delta(self, text: str) -> bytes:
        return self._event("response.custom_tool_call_input.delta", b'"delta":' + json_text(text)) if text else b""

    def _item(self, status: str, *, begins: bool = False) -> bytes:
        return json_line(
            {
                "id": self._id,
                "type": "custom_tool_call",
                "status": status,
                "call_id": self._call_id,
                "name": self._tool.name,
                **self._namespace(),
                "input": self._input.text,
            }
        )


class _WaitingCall:
    """A call that began while an earlier one had not ended."""

    __slots__ = ("arguments", "call_id", "has_ended", "name")

    def __init__(self, name: str, call_id: str) -> None:
        self.name, self.call_id = name, call_id
        self.arguments: list[str] = []
        self.has_ended = False


class OutputWriter:
    """Writes the items of one response. Every method returns the events it causes."""

    def __init__(
        self,
        events: EventNumbers,
        ids: ItemIds,
        called: Callable[[str], OfferedTool],
        shape: OutputShape,
    ) -> None:
        """`called` returns the tool behind a name that the model called."""
        self.items: list[Raw] = []
        """The items that are done."""
        self._events, self._ids, self._called, self._shape = events, ids, called, shape
        self._open: _OpenMessage | _OpenReasoning | _OpenCall | None = None
        self._blank: list[str] = []  # white space where no message is open: shown once more text follows
        self._waiting: list[_WaitingCall] = []  # behind the call that is open
        self._calls = 0  # that were opened

    def text(self, text: str, logprobs: bytes | None = None) -> bytes:
        """Add text; `logprobs` is a JSON array with those of its tokens."""
        message = self._open
        if isinstance(message, _OpenMessage):
            return message.add(json_text(text), logprobs)
        if text.isspace():
            self._blank.append(text)
            return b""
        text, self._blank = "".join([*self._blank, text]), []
        closed = self._close()
        message = self._open = _OpenMessage(self._events, self._ids.new("msg"), len(self.items))
        return closed + message.begin() + message.add(json_text(text), logprobs)

    def plain_text(self) -> Callable[[bytes], bytes] | None:
        """Return the short way of `text`, for JSON strings; None while no message is open."""
        return self._open.encoder() if isinstance(self._open, _OpenMessage) else None

    def reasoning(self, text: str) -> bytes:
        """Add reasoning."""
        if self._shape.hides_reasoning:
            return b""
        if isinstance(self._open, _OpenReasoning):
            return self._open.add(json_text(text))
        self._blank = []
        closed = self._close()
        reasoning = self._open = _OpenReasoning(self._events, self._ids.new("rs"), len(self.items), self._shape)
        return closed + reasoning.begin() + reasoning.add(json_text(text))

    def call(self, name: str, call_id: str) -> bytes:
        """Begin a call. While the one before has not ended, it waits: workers may write several calls in turns."""
        self._blank = []
        if self._waiting or (isinstance(self._open, _OpenCall) and not self._open.is_whole):
            self._waiting.append(_WaitingCall(name, call_id))
            return b""
        return self._close() + self._begin_call(name, call_id)

    def arguments(self, text: str, number: int | None = None) -> bytes:
        """Add to the arguments of a call: of the last one, or of the one with that number.

        Raises:
            Unknown: a worker goes on with a call that is done.
        """
        call, last = self._open, self._calls + len(self._waiting) - 1
        behind = (last if number is None else number) - self._calls
        if not isinstance(call, _OpenCall) or not -1 <= behind < len(self._waiting):
            raise Unknown("the worker sent arguments of a tool call that was over, or never began")
        if behind >= 0:
            self._waiting[behind].arguments.append(text)
            return b""
        told = call.add(text) if text else b""
        while self._waiting and isinstance(self._open, _OpenCall) and self._open.is_whole:
            told += self._close_one() + self._begin_waiting()
        return told

    def call_ended(self) -> bytes:
        """End the call that began last."""
        if self._waiting:
            self._waiting[-1].has_ended = True
        elif isinstance(call := self._open, _OpenCall):
            call.has_ended = True
            return self._close_one() if call.is_whole else b""
        return b""

    def call_dropped(self) -> bytes:
        """End a call that is none: what was sent of it stays, as a call that cannot be run."""
        return self._close_one("incomplete") if isinstance(self._open, _OpenCall) else b""

    def finish(self, status: Status, *, is_failed: bool = False) -> bytes:
        """End the output; `status` is that of an item that is still open.

        An answer of nothing is an empty message, unless it failed.
        """
        if self._open is None and not self.items and not is_failed:
            text, self._blank = "".join(self._blank), []
            message = self._open = _OpenMessage(self._events, self._ids.new("msg"), 0)
            told = message.begin() + (message.add(json_text(text)) if text else b"")
            return told + self._close_one(status)
        return self._close("incomplete" if status == "incomplete" else None)

    def _begin_call(self, name: str, call_id: str) -> bytes:
        tool = self._called(name)
        kind, prefix = (_OpenCustomCall, "ctc") if tool.is_custom else (_OpenCall, "fc")
        call = self._open = kind(self._events, self._ids.new(prefix), len(self.items), call_id, tool)
        self._calls += 1
        return call.begin()

    def _begin_waiting(self) -> bytes:
        waiting = self._waiting.pop(0)
        told = self._begin_call(waiting.name, waiting.call_id)
        call = self._open
        assert isinstance(call, _OpenCall)
        call.has_ended = waiting.has_ended
        written = "".join(waiting.arguments)
        return told + (call.add(written) if written else b"")

    def _close(self, status: Status | None = None) -> bytes:
        """Close what is open, and every call behind it. With None an item is complete, and a call when its arguments are."""
        told = self._close_one(status)
        while self._waiting:
            told += self._begin_waiting() + self._close_one(status)
        return told

    def _close_one(self, status: Status | None = None) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if status is None or (isinstance(item, _OpenCall) and item.has_ended and status == "incomplete"):
            status = item.settled_status if isinstance(item, _OpenCall) else "completed"
        told, written = item.end(status)
        self.items.append(Raw(written))
        return told


def _joined(pieces: list[bytes]) -> bytes:
    """Return JSON strings as one."""
    return b'"%b"' % b"".join([piece[1:-1] for piece in pieces])

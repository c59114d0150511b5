"""The items of a response stream on the native wire, and the errors among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Final, Literal

import msgspec

from dynamo.errors import (
    DynamoException,
    InvalidArgument,
    Overloaded,
    RequestKillsWorkers,
    RouterQueueLimitExceeded,
    SelectionServiceError,
    Unknown,
    describe,
    http_assertion,
    kind_of,
    revive,
)
from dynamo.runtime.calls.request_plane.base import OBJECT_INDEX, StreamItem
from dynamo.runtime.calls.request_plane.native.frames import (
    JSON,
    PREFIX,
    UNREADABLE,
    Codec,
    MalformedFrame,
    bytes_as_lists,
    encode_two_part,
)

_MSGPACK: Final = msgspec.msgpack.Encoder()
_NO_PREFIX: Final = bytes(PREFIX.size)

MOST_MISSES: Final = 3
"""Of a stream with so many items that are more than token ids none is tried as such any more: it brings objects, or log probabilities."""


def append_item(out: bytearray, annotated: Mapping[str, Any], codec: Codec) -> None:
    """Append one item frame; `annotated` is {data?, id?, event?, comment?, error?}.

    Raises TypeError (or another error of the encoder) for what the codec cannot carry, leaving `out` as it was.
    """
    start = len(out)
    out += _NO_PREFIX
    try:
        if codec == "msgpack":
            _MSGPACK.encode_into({"data": annotated, "complete_final": False}, out, -1)
        else:
            JSON.encode_into({"data": bytes_as_lists(annotated), "complete_final": False}, out, -1)
    except BaseException:
        del out[start:]
        raise
    PREFIX.pack_into(out, start, 0, len(out) - start - PREFIX.size, 0)


FINAL_ITEM: Final[Mapping[Codec, bytes]] = {
    "msgpack": encode_two_part(b"", _MSGPACK.encode({"complete_final": True})),
    "json": encode_two_part(b"", JSON.encode({"complete_final": True})),
}


class AnnotatedItem(msgspec.Struct, omit_defaults=True, gc=False):
    """What travels in one item; an absent member is UNSET, so that a null stays one."""

    data: Any = msgspec.UNSET
    id: Any = msgspec.UNSET
    event: Any = msgspec.UNSET
    comment: Any = msgspec.UNSET
    error: Any = msgspec.UNSET


class ResponseFrame(msgspec.Struct, gc=False):
    """One data frame of a response stream."""

    data: AnnotatedItem | None = None
    complete_final: bool = False


_ITEM_DECODERS: Final[Mapping[Codec, Any]] = {
    "msgpack": msgspec.msgpack.Decoder(ResponseFrame),
    "json": msgspec.json.Decoder(ResponseFrame),
}


def decode_item(data: bytes | bytearray, codec: Codec) -> ResponseFrame:
    """Decode one data frame of a response stream. Raises `MalformedFrame`."""
    try:
        frame: ResponseFrame = _ITEM_DECODERS[codec].decode(data)
    except UNREADABLE as error:
        raise MalformedFrame(f"item is not {codec}: {error}") from error
    return frame


class _Chunk(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A chunk of tokens whose other members are null, and which 1.6 sends with every chunk."""

    token_ids: list[int]
    index: Annotated[int, msgspec.Meta(ge=0)] | None
    tokens: None = None
    text: None = None
    output_type: Literal["text"] | None = None
    cum_log_probs: None = None
    log_probs: None = None
    top_logprobs: None = None
    finish_reason: None = None
    stop_reason: None = None


class _ChunkItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    data: _Chunk


class _ChunkFrame(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    data: _ChunkItem
    complete_final: bool = False


_CHUNK_DECODERS: Final[Mapping[Codec, Any]] = {
    "msgpack": msgspec.msgpack.Decoder(_ChunkFrame),
    "json": msgspec.json.Decoder(_ChunkFrame),
}


class ChunkReader:
    """Reads those items of one stream that are nothing but token ids. Nearly every item is, and to decode one by its type takes
    a third of the time."""

    __slots__ = ("_decode", "_misses", "codec")

    def __init__(self, codec: Codec) -> None:
        self.codec: Codec = codec
        self._decode, self._misses = _CHUNK_DECODERS[codec].decode, 0

    def read(self, data: bytes | bytearray) -> StreamItem | None:
        """Return what `stream_item` makes of such a data frame; None for one that may be another."""
        if self._misses >= MOST_MISSES:
            return None
        try:
            frame = self._decode(data)
        except UNREADABLE:
            self._misses += 1
            return None
        chunk = frame.data.data
        ids = chunk.token_ids
        return StreamItem(0, chunk.index or 0, 0, ids) if ids and not frame.complete_final else None


def bare_item(data: bytes | bytearray, codec: Codec) -> dict[str, Any]:
    """Decode the data of an item without an annotated envelope: a few endpoints of 1.6 (KV queries) wrap nothing."""
    decode = msgspec.msgpack.decode if codec == "msgpack" else msgspec.json.decode
    try:
        found = decode(data, type=dict[str, Any])["data"]
    except (*UNREADABLE, KeyError) as error:
        raise MalformedFrame(f"item is not {codec}: {error}") from error
    return found if isinstance(found, dict) else {"data": found}


def failure_of(annotated: AnnotatedItem) -> DynamoException | None:
    """Return the error that an item carries, which ends its stream; None for any other item."""
    if annotated.event != "error":
        return None
    if isinstance(annotated.error, dict):
        error = revive(annotated.error)
        if (asserted := _asserted_in(error)) is not None:
            return asserted
        match annotated.error.get("public"):
            case {"message": str(text)} if text != str(error):
                error.args = (text,)  # what was written for clients, without the prefixes meant for logs
        return error
    comment = annotated.comment
    texts = comment if isinstance(comment, list) else ()
    return Unknown("; ".join(map(str, texts)) or "the worker sent an error without a text")


def _asserted_in(error: DynamoException) -> DynamoException | None:
    """Return the error of a status that the engine asserted: 1.6.1 sends it under several types, we under two."""
    asserted = http_assertion(Unknown(str(error)))
    if asserted is None or asserted[0] in (499, 503, 529) or not 400 <= asserted[0] < 600:
        return None
    claim: DynamoException = Unknown(str(error))
    if asserted[0] < 500:
        claim = InvalidArgument(str(error))
        claim.public = False
    claim.is_reported = error.is_reported
    claim.__cause__ = error.__cause__
    return claim


def stream_item(annotated: AnnotatedItem) -> StreamItem:
    """Return an item as the planes see it; the caller fills in the item's offset (or cost).

    The wire does not mark a chunk of tokens: it is one when it is nothing but data with `token_ids` and `index`, as
    every engine's chunk is. Its null members are left out.
    """
    data = annotated.data
    if (
        type(data) is dict
        and type(token_ids := data.get("token_ids")) is list
        and type(index := data.get("index", "")) in (int, NoneType)
        and (index is None or index >= 0)
        and ((len(token_ids) == 1 and type(token_ids[0]) is int) or {int}.issuperset(map(type, token_ids)))
        and annotated.event is annotated.comment is annotated.id is msgspec.UNSET
    ):
        extra = {key: value for key, value in data.items() if value is not None}
        del extra["token_ids"]
        extra.pop("index", None)
        if extra.get("output_type") == "text":
            del extra["output_type"]  # 1.6 sends it with every chunk
        if not extra:
            return StreamItem(0, index or 0, 0, token_ids)
        reason = extra.pop("finish_reason", None)
        return StreamItem(0, index or 0, 0, token_ids, reason, extra or None)
    envelope = {
        name: value
        for name in ("data", "id", "event", "comment")
        if (value := getattr(annotated, name)) is not msgspec.UNSET
    }
    return StreamItem(0, OBJECT_INDEX, 0, [], None, envelope)


def error_item(error: BaseException) -> dict[str, Any]:
    """Build the annotated envelope that ends a stream with an error."""
    return {"event": "error", "error": error_record(error)}


def error_record(error: BaseException) -> dict[str, Any]:
    """Return `errors.describe` in the dialect of 1.6.1: a frontend of that version turns it into the right HTTP
    status.
    """
    record = describe(error)
    asserted = http_assertion(error)
    if asserted is not None:
        # A status the engine asserts travels as JSON in the message; there is no text for clients.
        status, message = asserted
        record["error_type"], record["class"], record["reason"] = _asserted_as(status)
        record["message"] = json.dumps({"message": message, "code": status})
        record.pop("public", None)
        return record
    kind = kind_of(error)
    # 1.6.1 answers 500 to a reason it does not list under the record's class, whatever the class means.
    record["reason"] = _REASONS.get(kind, record["reason"])
    record["error_type"] = _ERROR_TYPES.get(kind, record["error_type"])
    return record


def _asserted_as(status: int) -> tuple[str, str, str]:
    """Type, class and reason that 1.6.1 gives a status which an engine asserts."""
    if (found := _ASSERTED.get(status)) is not None:
        return found
    if 400 <= status < 500:
        return "InvalidArgument", "InvalidRequest", "request.invalid"
    return "Unknown", "Internal", "runtime.internal"


_ASSERTED: Final[Mapping[int, tuple[str, str, str]]] = {
    401: ("Unknown", "Unauthenticated", "request.unauthenticated"),
    403: ("Unknown", "PermissionDenied", "request.permission_denied"),
    404: ("Unknown", "NotFound", "request.not_found"),
    408: ("ResponseTimeout", "DeadlineExceeded", "request.deadline_exceeded"),
    409: ("Unknown", "Conflict", "request.conflict"),
    413: ("InvalidArgument", "PayloadTooLarge", "request.payload_too_large"),
    415: ("InvalidArgument", "UnsupportedMedia", "request.unsupported_media"),
    429: ("ResourceExhausted", "RateLimited", "request.rate_limited"),
    431: ("InvalidArgument", "PayloadTooLarge", "request.payload_too_large"),
    499: ("Cancelled", "Cancelled", "request.cancelled"),
    501: ("Unknown", "NotImplemented", "runtime.not_implemented"),
    502: ("Unknown", "BackendProtocol", "backend.protocol"),
    503: ("Unavailable", "Unavailable", "backend.unavailable"),
    504: ("ResponseTimeout", "DeadlineExceeded", "request.deadline_exceeded"),
    529: ("ResourceExhausted", "CapacityExhausted", "capacity.exhausted"),
}

_REASONS: Final[Mapping[type[DynamoException], str]] = {
    Overloaded: "capacity.worker_overloaded",
    RouterQueueLimitExceeded: "capacity.exhausted",
    SelectionServiceError: "backend.unknown",
    RequestKillsWorkers: "backend.unknown",
}
_ERROR_TYPES: Final[Mapping[type[DynamoException], Any]] = {  # kinds of ours that 1.6.1 has no type for
    RouterQueueLimitExceeded: "ResourceExhausted",  # never migrated, like ours
    SelectionServiceError: {"Backend": "Unknown"},
    RequestKillsWorkers: {"Backend": "Unknown"},
}

"""What routers report to each other, as bytes: bookings of requests, and bindings of sessions. The native forms. Pure.

The members stand in the native order. A message of bookings is `{"events": [event, ...]}` over ZMQ and one bare event over
NATS; both are read, whichever way they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from dynamo.placement.session_affinity import AffinityRecord

MAX_BATCH: Final = 256  # events of one message over ZMQ
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024  # that are read: the prompts of a batch, 8,192 blocks each
MAX_MESSAGE_EVENTS: Final = 4_096
MAX_PROMPT_BLOCKS: Final = 65_536  # a million tokens in blocks of 16
MAX_ID_LENGTH: Final = 1_024
MAX_TOKENS: Final = 2**31
_U64: Final = 2**64 - 1
_ROUTER_STEP: Final = 0x9E3779B97F4A7C15
"""Between the names that two routers with neighbouring ids give to blocks of their own. All routers count from the same
number; odd, so that different ids never meet, and 2**64 over the golden ratio, so that near ones lie far apart."""

RequestStep = Literal["MarkPrefillCompleted", "Free"]
"""What happens to a request that is booked."""


class BadReplicaEvents(ValueError):
    """A message of another router cannot be read; holds the reason."""


class BookedWorker(msgspec.Struct, frozen=True, gc=False):
    """The rank that a booking is about."""

    worker_id: int
    dp_rank: int = 0


class PrefillHint(msgspec.Struct, frozen=True, gc=False):
    """How much of a prompt is to be computed."""

    initial_effective_prefill_tokens: int
    expected_prefill_duration: object = None  # of a load model that this router has not


class BookedPrompt(msgspec.Struct, frozen=True, gc=False):
    """A request that was sent to a rank."""

    token_sequence: Sequence[int] | None  # chained hashes of the complete blocks; None: the sender counts no blocks
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    prefill_load_hint: PrefillHint | None = None


class BookingEvent(msgspec.Struct, frozen=True, gc=False):
    """One step of a request: it was booked, its first token is there, or it has ended."""

    request_id: str
    worker: BookedWorker
    data: BookedPrompt | RequestStep
    router_id: int  # the router that booked the request; a worker that reports a first token gives its own id
    lora_name: str | None = None


class _AddRequest(msgspec.Struct, frozen=True, gc=False):
    AddRequest: BookedPrompt


class _Written(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    worker: BookedWorker
    data: _AddRequest | str
    router_id: int
    lora_name: str | None


class _Message(msgspec.Struct, frozen=True, gc=False):
    events: list[_Written]


class _Read(msgspec.Struct, frozen=True, gc=False):
    request_id: str
    worker: BookedWorker
    data: dict[str, msgspec.Raw] | str
    router_id: int
    lora_name: str | None = None


class _ReadMessage(msgspec.Struct, frozen=True, gc=False):
    """Either form: a batch has `events`, a bare event has all else."""

    events: list[_Read] | None = None
    request_id: str | None = None


_encode: Final = msgspec.msgpack.Encoder().encode
_message: Final = msgspec.msgpack.Decoder(_ReadMessage).decode
_event: Final = msgspec.msgpack.Decoder(_Read).decode
_prompt: Final = msgspec.msgpack.Decoder(BookedPrompt).decode
_binding: Final = msgspec.msgpack.Decoder(AffinityRecord).decode


def encode_bookings(events: Sequence[BookingEvent]) -> bytes:
    """Return the message of a batch, as it goes over ZMQ."""
    return _encode(_Message([_written(event) for event in events]))


def encode_booking(event: BookingEvent) -> bytes:
    """Return the message of one event, as it goes over NATS."""
    return _encode(_written(event))


def decode_bookings(payload: bytes) -> list[BookingEvent]:
    """Return the events of a message; steps that this version does not know are left out. Raises BadReplicaEvents."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BadReplicaEvents(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        found = _message(payload)
        if found.events is not None and len(found.events) > MAX_MESSAGE_EVENTS:
            raise BadReplicaEvents(f"a message of {len(found.events)} events; at most {MAX_MESSAGE_EVENTS} are read")
        read = [_event(payload)] if found.events is None else found.events
        return [event for each in read if (event := _understood(each)) is not None]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReplicaEvents(f"not a message of bookings: {error}") from error


def check_booking(event: BookingEvent) -> None:
    """Refuse an event that no router can have sent. Raises BadReplicaEvents naming the member."""
    if len(event.request_id) > MAX_ID_LENGTH:
        raise BadReplicaEvents(f"request_id has {len(event.request_id)} characters, more than {MAX_ID_LENGTH}")
    if not 0 <= event.router_id <= _U64:
        raise BadReplicaEvents("router_id is not an unsigned number of 64 bits")
    prompt = event.data
    if not isinstance(prompt, BookedPrompt):
        return
    if len(prompt.token_sequence or ()) > MAX_PROMPT_BLOCKS:
        raise BadReplicaEvents(
            f"token_sequence has {len(prompt.token_sequence or ())} blocks, more than {MAX_PROMPT_BLOCKS}"
        )
    hint = prompt.prefill_load_hint
    for name, tokens in (
        ("initial_effective_prefill_tokens", 0 if hint is None else hint.initial_effective_prefill_tokens),
        ("expected_output_tokens", prompt.expected_output_tokens or 0),
    ):
        if not 0 <= tokens <= MAX_TOKENS:
            raise BadReplicaEvents(f"{name} must be between 0 and {MAX_TOKENS}, got {tokens}")


def encode_binding(record: AffinityRecord) -> bytes:
    """Return the message that reports the binding of a session."""
    return _encode(record)


def decode_binding(payload: bytes) -> AffinityRecord:
    """Return the binding that a message reports. Raises BadReplicaEvents."""
    try:
        return _binding(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadReplicaEvents(f"not a binding of a session: {error}") from error


def _written(event: BookingEvent) -> _Written:
    data = event.data
    if isinstance(data, BookedPrompt):
        sequence = data.token_sequence
        if isinstance(sequence, range):  # names of blocks that no other block of the router has: they are below 0
            first = event.router_id * _ROUTER_STEP
            data = msgspec.structs.replace(data, token_sequence=[(block + first) & _U64 for block in sequence])
        return _Written(event.request_id, event.worker, _AddRequest(data), event.router_id, event.lora_name)
    return _Written(event.request_id, event.worker, data, event.router_id, event.lora_name)


def _understood(read: _Read) -> BookingEvent | None:
    data = read.data
    step: BookedPrompt | RequestStep
    match data:
        case "MarkPrefillCompleted" | "Free":
            step = data
        case dict() if "AddRequest" in data:
            step = _prompt(data["AddRequest"])
        case _:
            return None
    return BookingEvent(read.request_id, read.worker, step, read.router_id, read.lora_name)

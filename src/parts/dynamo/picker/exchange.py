"""One HTTP request on its way through the gateway: what is sent for each message of its stream. No gRPC here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Final

from dynamo.picker.addresses import member_of, read_hint
from dynamo.picker.choice import Destination, PickedWorker, Picker, Refusal, Request
from dynamo.picker.messages import BodyMode, Message, MessagePhase, Modes, Mutation, answer, body_chunks, immediate
from dynamo.picker.settings import PickerSettings
from dynamo.protocol.openai.errors import RequestRejected

logger = logging.getLogger(__name__)

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
SENDABLE: Final = frozenset({*range(400, 430), 431, *range(500, 509), 510, 511})
"""The statuses of failures that Envoy can send."""
# A member of an enumeration takes ten times as long to look up as a name of this file.
_NONE, _STREAMED, _BUFFERED, _PARTIAL, _FULL_DUPLEX = BodyMode
_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY, _, _RESPONSE_TRAILERS = MessagePhase
_REMOVED: Final = (SUBSET, SERVED)
_EVENT: Final = b"data:"  # one of them is about one token of a stream

Answers = list[bytes] | Coroutine[None, None, list[bytes]]
"""What is sent for a message: at once, or after a wait."""


class GatewayExchange:
    """Answers the messages of one stream. Close it on every path: a gateway ends the stream without a word."""

    def __init__(self, picker: Picker, settings: PickerSettings) -> None:
        self._picker, self._settings = picker, settings
        self._modes = Modes()
        self._head: Message | None = None
        self._body = bytearray()
        self._selection: PickedWorker | None = None
        self.is_over = False  # nothing more is sent on this stream
        self.is_choosing = False  # the choice takes its time, maybe in the router's queue
        self._is_sent = False  # the request is on its way to its worker

    def take(self, message: Message) -> Answers:
        """Return the answers to one message, in order, or what gives them once it is awaited."""
        if message.modes is not None:
            self._modes = message.modes
        phase = message.phase
        if phase is _REQUEST_HEADERS:
            return self._request_headers(message)
        if phase is _REQUEST_BODY:
            return self._request_body(message)
        if phase is _RESPONSE_HEADERS:
            return self._response_headers(message)
        if phase is _RESPONSE_BODY:
            return self._response_body(message)
        if phase is _RESPONSE_TRAILERS:
            self.close()
            return [answer(phase)]
        # The trailers of a request: a body that no message ended ends here.
        return [answer(phase)] if self._is_sent else self._request_trailers(message)

    def close(self) -> None:
        """Give back what is held for the request. Idempotent."""
        if self._selection is not None:
            self._selection.close()

    # -- the request ---------------------------------------------------------------------------------------------------

    def _request_headers(self, message: Message) -> Answers:
        self._head = message
        if message.is_last or self._modes.request == _NONE:
            return self._choose()
        if self._modes.request in (_BUFFERED, _PARTIAL):
            return [answer(_REQUEST_HEADERS)]  # the choice comes with the body
        if self._modes.request == _STREAMED:
            return self._refuse(
                RequestRejected(500, "the picker takes bodies BUFFERED or FULL_DUPLEX_STREAMED, not STREAMED")
            )
        return []

    def _request_body(self, message: Message) -> Answers:
        if self._is_sent:
            return []  # a second end of the body, which Envoy has sent at times
        self._body += message.body
        if len(self._body) > self._picker.body_limit_bytes:
            limit = self._picker.body_limit_bytes
            return self._refuse(RequestRejected(413, f"The body is longer than {limit} bytes"))
        if not message.is_last and self._modes.request == _FULL_DUPLEX:
            return []
        return self._choose()

    async def _request_trailers(self, message: Message) -> list[bytes]:
        answers = await self._choose(is_ended_by_trailers=True)
        return answers if self.is_over else [*answers, answer(message.phase)]

    async def _choose(self, *, is_ended_by_trailers: bool = False) -> list[bytes]:
        """Choose the worker, and send the request there."""
        head, self._is_sent = self._head, True
        if head is None:
            return self._refuse(RequestRejected(500, "the gateway sent no headers of the request"))
        self._head, body = None, bytes(self._body)
        self._body.clear()
        is_bodiless = head.is_last or self._modes.request == _NONE
        self.is_choosing = True
        try:
            self._selection = await self._picker.choose(self._request(head, None if is_bodiless else body))
        except Refusal as refusal:
            status = refusal.status if refusal.status in SENDABLE else 500
            logger.info("a request is answered with %d: %s", status, refusal)
            self.is_over = True
            return [_immediate(status, refusal.body, refusal.headers)]
        finally:
            self.is_choosing = False
        mutation = self._mutation(self._selection.choice)
        if is_bodiless:
            return [answer(_REQUEST_HEADERS, mutation, reroutes=True)]
        if self._modes.request != _FULL_DUPLEX:
            return [answer(_REQUEST_BODY, mutation, reroutes=True)]
        chunks = body_chunks(_REQUEST_BODY, body, is_last=not is_ended_by_trailers)
        return [answer(_REQUEST_HEADERS, mutation, reroutes=True), *chunks]

    def _request(self, head: Message, body: bytes | None) -> Request:
        named = dict(head.headers)
        path = named.get(b":path", b"/").decode("latin-1").partition("?")[0]
        hint = member_of(head.metadata, self._settings.subset_namespace, SUBSET)
        return Request(named.get(b":method", b"").decode("latin-1"), path, head.headers, body, read_hint(hint))

    def _mutation(self, choice: Destination) -> Mutation:
        destination = ",".join(choice.addresses)
        return Mutation(
            ((DESTINATION, destination), *choice.headers),
            _REMOVED,
            (self._settings.destination_namespace, DESTINATION, destination),
        )

    def _refuse(self, rejected: RequestRejected) -> list[bytes]:
        self.is_over = True
        return [_immediate(rejected.status, rejected.body(), rejected.headers())]

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _response_headers(self, message: Message) -> Answers:
        selection = self._selection
        if selection is None:
            return [answer(message.phase)]
        served = member_of(message.metadata, self._settings.destination_namespace, SERVED)
        if isinstance(served, str) and served != selection.choice.addresses[0]:
            return self._moved(message, selection, served)
        return self._begun(message, selection)

    async def _moved(self, message: Message, selection: PickedWorker, served: str) -> list[bytes]:
        await selection.served_by(served)
        return self._begun(message, selection)

    def _begun(self, message: Message, selection: PickedWorker) -> list[bytes]:
        if self._modes.response == _NONE:  # nothing else of the answer is seen
            selection.hold.first_output(asyncio.get_running_loop().time())
        if message.is_last:
            selection.close()
        return [answer(message.phase)]

    def _response_body(self, message: Message) -> list[bytes]:
        selection = self._selection
        if selection is not None:
            if message.body:
                selection.hold.first_output(asyncio.get_running_loop().time())
                selection.hold.add_tokens(message.body.count(_EVENT))
            if message.is_last:
                selection.close()
        if self._modes.response == _FULL_DUPLEX:
            return body_chunks(message.phase, message.body, is_last=message.is_last)
        return [answer(message.phase)]


def _immediate(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    return immediate(status, body, [("content-type", "application/json"), *headers.items()])

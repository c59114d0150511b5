"""The route by which the inspectors of a cluster ask each other."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.frontend.base.asgi import (
    BodyBudget,
    ClientGone,
    Receive,
    Scope,
    Send,
    first_headers,
    read_body,
    reply,
    reply_rejected,
)
from dynamo.frontend.parts.inspector.inspector import Inspector
from dynamo.frontend.parts.inspector.members import Question
from dynamo.frontend.parts.inspector.other_frontends import PEER_HEADER
from dynamo.protocol.inspector.filters import FilterError
from dynamo.protocol.openai.errors import RequestRejected

__all__ = ["PeerRoute"]

MAX_QUESTION_BYTES: Final = 16 * 1024


class PeerRoute:
    """Answers a question of another frontend that has the same key."""

    def __init__(self, inspector: Inspector, budget: BodyBudget) -> None:
        self._inspector, self._budget = inspector, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        except RequestRejected as rejected:
            await reply_rejected(send, rejected)
            return
        await reply(send, 200, answer, content_type=b"application/msgpack", extra=((b"cache-control", b"no-store"),))

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        headers = first_headers(scope)
        raw = await read_body(headers, receive, MAX_QUESTION_BYTES, self._budget)
        others = self._inspector.others
        if others is None or not others.is_asked_rightly(headers.get(PEER_HEADER.encode(), b"").decode("latin-1"), raw):
            raise RequestRejected(401, "This question does not come from a frontend with the key of this cluster")
        try:
            question = msgspec.msgpack.decode(raw, type=Question)
            return msgspec.msgpack.encode(await self._inspector.answer_frontend(question))
        except (msgspec.MsgspecError, FilterError, LookupError) as error:
            raise RequestRejected(400, f"this question is not understood: {error}") from None

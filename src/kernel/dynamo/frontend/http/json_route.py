"""A route that answers with one JSON body, or with the rejection that was raised on the way to it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dynamo.frontend.base.asgi import ClientGone, Receive, Scope, Send, reply, reply_rejected
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.openai.errors import RequestRejected


class JsonRoute(ABC):
    """One ASGI application; a subclass makes the body."""

    dialect: Dialect = OPENAI
    """The shape of its errors."""

    leaves_body_unread = False
    """Whether a POST may be refused before its body was read: then its connection is closed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._answer(scope, receive)
        except ClientGone:
            return
        except RequestRejected as error:
            is_unread = self.leaves_body_unread and scope["method"] == "POST"
            further = ((b"connection", b"close"),) if is_unread else ()
            await reply_rejected(send, error, further, dialect=self.dialect)
        else:
            await reply(send, 200, body)

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body. Raises RequestRejected, and ClientGone when the answer has no reader."""

"""Routes of OpenAI's API that this version does not have: each says so by its name."""

from __future__ import annotations

from typing import Final

from dynamo.frontend.base.asgi import Receive, Scope, Send, reply_rejected
from dynamo.protocol.openai.errors import not_built

__all__ = ["NOT_BUILT_ROUTES", "NotBuiltRoute"]

NOT_BUILT_ROUTES: Final = {
    "/v1/images/variations": "Varying images",
    "/v1/videos/stream": "Streaming videos",
    "/v1/videos/edits": "Editing videos",
    "/v1/videos/extensions": "Extending videos",
    "/v1/videos/characters": "Characters of videos",
    "/v1/videos/{video_id}/remix": "Varying videos",
}


class NotBuiltRoute:
    """Answers every request with the 422 of what is not built; nothing of its body is read."""

    def __init__(self, what: str) -> None:
        self._what = what

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, not_built(f"{self._what} is not in this version"))

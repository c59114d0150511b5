"""What was made and is kept: `/v1/videos/{id}` and its content, and the links to pictures and videos."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from urllib.parse import parse_qs

import msgspec

from dynamo.frontend.base.access import owner_of
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply_rejected
from dynamo.frontend.http.file_content import send_content
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.parts.media.apis.videos import VIDEO_KIND
from dynamo.frontend.parts.media.store import KeptMedia, MediaStore
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.videos import video_list, video_page


def _checked(store: MediaStore | None) -> MediaStore:
    if store is None:
        raise RequestRejected(404, "Videos are in the answer only: this frontend keeps none (DYN_MEDIA_STORE)")
    return store


async def _video(store: MediaStore | None, scope: Scope) -> KeptMedia:
    id: str = scope["path_params"]["video_id"]
    kept = await asyncio.to_thread(_checked(store).find, id, owner_of(scope))
    if kept is None or kept.kind != VIDEO_KIND:
        raise RequestRejected(404, f"No such Video: {id[:128]}", param="id", stream_type="invalid_request_error")
    return kept


def _shown(kept: KeptMedia) -> dict[str, object]:
    return {**kept.details, "expires_at": int(kept.expires_at)}


class VideoListRoute(JsonRoute):
    """GET `/v1/videos`."""

    def __init__(self, store: MediaStore | None) -> None:
        self._store = store

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        page = video_page(parse_qs(scope["query_string"].decode("latin-1")))
        found = await asyncio.to_thread(_checked(self._store).listed, VIDEO_KIND, owner_of(scope))
        return video_list([_shown(each) for each in found], page)


class VideoRoute(JsonRoute):
    """GET and DELETE `/v1/videos/{id}`."""

    def __init__(self, store: MediaStore | None) -> None:
        self._store = store

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        kept = await _video(self._store, scope)
        if scope["method"] == "DELETE":
            await asyncio.to_thread(_checked(self._store).remove, kept.id)
            return msgspec.json.encode({"id": kept.id, "object": "video.deleted", "deleted": True})
        return msgspec.json.encode(_shown(kept))


class _ContentRoute:
    """Sends a kept file, whole or one range of it."""

    def __init__(self, store: MediaStore | None) -> None:
        self._store = store

    async def _find(self, scope: Scope) -> KeptMedia:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            kept = await self._find(scope)
            opened = await asyncio.to_thread(partial(_checked(self._store).open, kept))
            if opened is None:
                raise RequestRejected(404, f"It was removed: {kept.id}")
        except RequestRejected as error:
            await reply_rejected(send, error)
            return
        try:
            await send_content(scope, send, opened, kept.size, kept.content_type.encode())
        finally:
            os.close(opened)


class VideoContentRoute(_ContentRoute):
    """GET `/v1/videos/{id}/content`."""

    async def _find(self, scope: Scope) -> KeptMedia:
        variant = parse_qs(scope["query_string"].decode("latin-1")).get("variant", ["video"])[0]
        if variant in ("thumbnail", "spritesheet"):
            raise not_built(f"The {variant} of a video is not in this version", "variant")
        if variant != "video":
            raise RequestRejected(400, "variant must be video, thumbnail or spritesheet", param="variant")
        return await _video(self._store, scope)


class MediaLinkRoute(_ContentRoute):
    """GET `/v1/media`: a client that has the link has the file, until it expires."""

    async def _find(self, scope: Scope) -> KeptMedia:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        id, expires, signature = (query.get(name, [""])[0] for name in ("id", "expires", "signature"))
        kept = await asyncio.to_thread(_checked(self._store).linked, id, expires, signature)
        if kept is None:
            raise RequestRejected(404, "The link is not valid, or it has expired")
        return kept

"""`/v1/videos`, for raw engines: the answer comes when the video is made, and the video is kept where there is a store."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.parts.media.relay import (
    MAX_RESULT_BYTES,
    Planning,
    Relayed,
    RelayedApi,
    RelayWriter,
    check_raw,
    check_status,
    note_usage,
)
from dynamo.frontend.parts.media.store import MediaStore
from dynamo.frontend.pipeline.inputs import result_plan
from dynamo.frontend.pipeline.result_api import ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.shapes import RequestMedia
from dynamo.protocol.videos import (
    VIDEOS,
    MadeVideo,
    VideoRequest,
    read_video,
    reference_image,
    validate_video,
    video_body,
    video_object,
)

VIDEO_KIND = "video"  # of what is kept


class VideosApi(RelayedApi[VideoRequest]):
    """A video of a prompt."""

    endpoint = "videos"
    id_prefix = "video-"
    model_type = ModelType.Videos

    def __init__(self, store: MediaStore | None) -> None:
        """`store`: keeps the videos; None: they are in the answer only."""
        self._store = store

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> VideoRequest:
        request: VideoRequest = VIDEOS.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: VideoRequest) -> None:
        validate_video(request)

    async def plan(self, at: Planning, request: VideoRequest) -> ResultPlan:
        check_raw(at.model, "Videos")
        image = None
        if parts := reference_image(request):
            media = request.media = RequestMedia(parts, [])
            (content,) = await at.media.contents(media, at.model, at.context)
            image = parts[0].url if content is None else content.url
        return result_plan(at.preprocessor, request, at.model, [video_body(request, image)], 0)

    def writer(self, request: VideoRequest, relayed: Relayed) -> RelayWriter:
        return _VideoWriter(request, relayed, self._store)


class _VideoWriter(RelayWriter):
    """One answer with a video."""

    def __init__(self, request: VideoRequest, relayed: Relayed, store: MediaStore | None) -> None:
        super().__init__()
        self._request, self._relayed, self._store = request, relayed, store
        self._created = int(time.time())
        self._made: MadeVideo | None = None
        self._answer: Mapping[str, object] = {}

    def take(self, found: Any) -> bytes:
        if isinstance(found, Mapping):
            check_status(found)
        if self._made is not None:
            raise Unknown("the worker sent more behind its video")
        self._made = read_video(found, MAX_RESULT_BYTES)
        if self._made is not None:
            self._answer = found
            note_usage(self._relayed.tally, found.get("usage"))
        return b""

    def end(self) -> bytes:
        raise Unknown("videos are not streamed")

    def whole(self) -> ResultReply:
        made = self._made
        if made is None:
            raise Unknown("the worker ended without a video")
        id = f"video_{uuid.uuid4().hex}"
        video = video_object(id, self._request, self._answer, self._created, int(time.time()))
        entry = made.entry
        if self._store is not None and made.content is not None:
            kept = self._store.keep(
                made.content, made.content_type, owner=self._relayed.key_owner, kind=VIDEO_KIND, id=id, details=video
            )
            video["expires_at"] = int(kept.expires_at)
            if self._request.response_format != "b64_json":
                entry = {**entry, "url": self._relayed.base_url + self._store.link(kept)}
                entry.pop("b64_json", None)
        return ResultReply(msgspec.json.encode({**video, "data": [entry]}))

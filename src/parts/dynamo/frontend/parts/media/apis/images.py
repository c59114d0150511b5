"""`/v1/images/generations`, `/v1/images/edits` and `/v1/videos`, for raw engines: whole pictures, or events of how they come about.

The answer with a video comes when the video is made, and the video is kept where there is a store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.errors import Unknown
from dynamo.frontend.parts.media.addresses import MediaRefused
from dynamo.frontend.parts.media.content import Media, read_media
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
from dynamo.frontend.parts.media.video_shapes import (
    VIDEOS,
    MadeVideo,
    VideoRequest,
    read_video,
    reference_image,
    validate_video,
    video_body,
    video_object,
)
from dynamo.frontend.pipeline.inputs import result_plan
from dynamo.frontend.pipeline.result_api import ResultReply
from dynamo.frontend.pipeline.result_plan import ResultPlan
from dynamo.protocol.image_answers import ImageFacts, check_base64, check_images, image_event, read_partial
from dynamo.protocol.images import (
    EDITS,
    IMAGES,
    ImageEditRequest,
    ImageRequest,
    edit_parts,
    image_body,
    validate_edit,
    validate_image,
)
from dynamo.protocol.model_types import ModelType
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.media_parts import refused_part
from dynamo.protocol.openai.shapes import RequestMedia

VIDEO_KIND = "video"  # of what is kept


class ImagesApi(RelayedApi[ImageRequest]):
    """Pictures of a prompt."""

    endpoint = "images"
    id_prefix = "img-"
    model_type = ModelType.Images

    def __init__(self, store: MediaStore | None = None) -> None:
        """`store`: keeps the pictures whose URLs are requested; None: their content is in the URLs."""
        self._store = store

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ImageRequest:
        request: ImageRequest = IMAGES.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: ImageRequest) -> None:
        validate_image(request)

    async def plan(self, at: Planning, request: ImageRequest) -> ResultPlan:
        check_raw(at.model, "Images")
        return result_plan(at.preprocessor, request, at.model, [image_body(request)], 0)

    def writer(self, request: ImageRequest, relayed: Relayed) -> RelayWriter:
        return _ImageWriter(request, relayed, self._store)


class EditsApi(RelayedApi[ImageEditRequest]):
    """Pictures made of pictures."""

    endpoint = "images"
    id_prefix = "img-"
    model_type = ModelType.Images

    def __init__(self, store: MediaStore | None = None) -> None:
        """`store`: keeps the pictures whose URLs are requested; None: their content is in the URLs."""
        self._store = store

    def decode(self, body: bytes, *, ignore_unsupported: bool, limits: BodyLimits) -> ImageEditRequest:
        request: ImageEditRequest = EDITS.read(body, ignore_unsupported=ignore_unsupported, limits=limits)
        return request

    def validate(self, request: ImageEditRequest) -> None:
        validate_edit(request)

    async def plan(self, at: Planning, request: ImageEditRequest) -> ResultPlan:
        check_raw(at.model, "Images")
        parts = edit_parts(request)
        media = request.media = RequestMedia(parts, [], owner=request.key_owner or "")
        contents = await at.media.contents(media, at.model, at.context)
        _check_mask(media, contents)
        urls = [
            content.url if content is not None else part.url or ""
            for part, content in zip(parts, contents, strict=True)
        ]
        mask = urls.pop() if parts[-1].where == "mask" else None
        return result_plan(at.preprocessor, request, at.model, [image_body(request, urls, mask)], 0)

    def writer(self, request: ImageEditRequest, relayed: Relayed) -> RelayWriter:
        return _ImageWriter(request, relayed, self._store)


def _check_mask(media: RequestMedia, contents: Any) -> None:
    """Refuse a mask that does not cover its image."""
    image, mask = contents[0], contents[-1]
    if media.parts[-1].where != "mask" or image is None or mask is None:
        return
    if not mask.url.startswith("data:image/png;"):
        raise refused_part("mask", "a mask must be a PNG, whose transparent places are edited")
    if (mask.width, mask.height) != (image.width, image.height):
        raise refused_part(
            "mask",
            f"the mask has {mask.width} x {mask.height} pixels, the image {image.width} x {image.height}: they must be alike",
        )


class _ImageWriter(RelayWriter):
    """One answer with images."""

    def __init__(self, request: ImageRequest, relayed: Relayed, store: MediaStore | None) -> None:
        super().__init__()
        self._request, self._relayed, self._store = request, relayed, store
        self._created = int(time.time())
        self._answer: Mapping[str, Any] | None = None

    def take(self, found: Any) -> bytes:
        if isinstance(found, Mapping):
            check_status(found)
        if self._answer is not None:
            raise Unknown("the worker sent more behind its images")
        partial = read_partial(found, self._request)
        if partial is not None:
            index, content = partial
            facts = _facts(content, f"partial image {index}")
            more = {"b64_json": content, "partial_image_index": index}
            return image_event("partial_image", self._request, facts, self._created, more)
        self._answer = check_images(found, self._request)
        self._relayed.tally.images_made = len(self._answer["data"])
        self.keep(
            sum(len(value) for entry in self._answer["data"] for value in entry.values() if isinstance(value, str))
        )
        usage = self._answer.get("usage")
        note_usage(self._relayed.tally, usage)
        if not self._request.is_streaming:
            return b""
        contents = [entry["b64_json"] for entry in self._answer["data"]]
        return b"".join(
            [
                image_event(
                    "completed",
                    self._request,
                    _facts(content, f"image {place}"),
                    self._created,
                    {"b64_json": content, "usage": usage},
                )
                for place, content in enumerate(contents)
            ]
        )

    def end(self) -> bytes:
        if self._answer is None:
            raise Unknown("the worker ended without an image")
        return b""

    def whole(self) -> ResultReply:
        if self._answer is None:
            raise Unknown("the worker ended without an image")
        if self._store is None or self._request.response_format == "b64_json":
            return ResultReply(msgspec.json.encode(self._answer))
        entries = [self._linked(self._store, entry) for entry in self._answer["data"]]
        return ResultReply(msgspec.json.encode({**self._answer, "data": entries}))

    def _linked(self, store: MediaStore, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the picture of a data URL, and return its entry with a link instead."""
        head, _, content = entry["url"].partition(",")
        if not (head.startswith("data:image/") and head.endswith(";base64")):
            return entry  # kept elsewhere
        data = check_base64(content, "image")
        kind = head.removeprefix("data:").removesuffix(";base64")
        kept = store.keep(data, kind, owner=self._relayed.key_owner, kind="image")
        return {**entry, "url": self._relayed.base_url + store.link(kept)}


def _facts(content: str, what: str) -> ImageFacts:
    data = check_base64(content, what)
    try:
        read: Media = read_media(data, "image", max_pixels=1 << 62)
    except MediaRefused as error:
        raise Unknown(f"the worker's {what} is not one: {error}") from error
    return ImageFacts(f"{read.width}x{read.height}", read.url[len("data:image/") :].partition(";")[0])


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
            media = request.media = RequestMedia(parts, [], owner=request.key_owner or "")
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

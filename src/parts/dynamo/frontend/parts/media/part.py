"""The routes of raw engines: pictures, sound and videos, each with the forms it takes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from dynamo.frontend.base.access import Access, owner_of
from dynamo.frontend.base.asgi import BodyBudget, Headers, Message, Receive, Scope, Send, reply_rejected
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.frontend.http.file_content import send_content
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.multipart import FilePiece, read_form
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.media.apis.audio import SpeechApi, TranscriptionsApi, TranslationsApi
from dynamo.frontend.parts.media.apis.images import VIDEO_KIND, EditsApi, ImagesApi, VideosApi
from dynamo.frontend.parts.media.content import media_type
from dynamo.frontend.parts.media.intake import MediaIntake
from dynamo.frontend.parts.media.metrics import FAMILIES
from dynamo.frontend.parts.media.relay import RelayCall, RelayedApi
from dynamo.frontend.parts.media.store import MEDIA_PATH, KeepLimits, KeptMedia, MediaStore
from dynamo.frontend.parts.media.video_shapes import VIDEO_FORM, VIDEOS_API, video_list, video_page
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.protocol.audio.transcripts import AUDIO_API, TRANSCRIPT_FORM
from dynamo.protocol.forms import FormFile, FormShape, form_body
from dynamo.protocol.image_answers import IMAGES_API
from dynamo.protocol.images import EDIT_FORM
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.schema import ApiDescription

MAX_FIELDS: Final = 64
MAX_FIELD_BYTES: Final = 256 * 1024  # a prompt of 32,000 characters has up to 128 KB
_MIB: Final = 1024 * 1024

_NO_FORM: Final = None


class FormLimit:
    """How long a form may be, and the setting that sets it."""

    __slots__ = ("size_bytes", "variable")

    def __init__(self, size_bytes: int, variable: str) -> None:
        self.size_bytes, self.variable = size_bytes, variable

    def exceeded(self) -> RequestRejected:
        """Return the 413 of a longer form."""
        text = f"Request body exceeds the limit of {self.size_bytes // _MIB} MB set by {self.variable}"
        return RequestRejected(413, text, limit="body_size")


class FormDoor:
    """Reads the forms of one route."""

    def __init__(self, shape: FormShape, limit: FormLimit, offload: Offload) -> None:
        self._shape, self._limit, self._offload = shape, limit, offload

    @staticmethod
    def takes(headers: Headers) -> bool:
        """Return whether a request declares that it is a form."""
        return headers.get(b"content-type", b"")[:10].lower() == b"multipart/"

    async def read(self, headers: Headers, receive: Receive, budget: BodyBudget) -> bytes:
        """Return the form as JSON. Nothing of a form that is refused is kept.

        Raises RequestRejected, and ClientGone when the client leaves.
        """
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced[:20]) > self._limit.size_bytes:
            raise self._limit.exceeded()
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            if taken + size > self._limit.size_bytes:
                raise self._limit.exceeded()
            budget.take(size)
            taken += size
            return message

        try:
            fields, files = await self._walk(headers, counted)
            return await self._offload(partial(form_body, fields, files, self._shape))
        except RequestRejected as error:
            error.more_headers = {**error.more_headers, "connection": "close"}  # the rest of the body is not read
            raise
        finally:
            budget.give_back(taken)

    async def _walk(self, headers: Headers, receive: Receive) -> tuple[list[tuple[str, str]], list[FormFile]]:
        fields: list[tuple[str, str]] = []
        files: list[FormFile] = []
        async for part in read_form(headers, receive, max_fields=MAX_FIELDS, max_field_bytes=MAX_FIELD_BYTES):
            if not isinstance(part, FilePiece):
                fields.append((part.name, part.value))
            elif part.begins:
                files.append(FormFile(part.name, bytearray(part.data)))
            else:
                files[-1].data += part.data
        for file in files:
            file.media_type = media_type(bytes(file.data[:16])) or file.media_type
        return fields, files


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


class _Form(NamedTuple):
    """The forms of one route: what their fields are, and which limit holds for them."""

    shape: FormShape
    is_sound: bool = False


class MediaService(Part):
    """The media of requests, and the routes of models that make some."""

    name: ClassVar[str] = "media"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, settings: MediaSettings, kernel: Kernel, intake: MediaIntake) -> None:
        """Raises InvalidArgument for a media store that cannot be used."""
        self._settings, self._kernel, self.intake = settings, kernel, intake
        self._store: MediaStore | None = None
        kernel.shares.show("fetched media", settings.cache_bytes, settings.cache_bytes, intake.fetcher.cache.count)
        if settings.store_dir is not None:
            limits = KeepLimits(settings.store_bytes, settings.store_seconds)
            self._store = store = MediaStore(settings.store_dir.expanduser(), limits)
            most = settings.store_bytes
            kernel.shares.show("kept media", most, most, partial(asyncio.to_thread, store.owners))

    def inference(self) -> Mapping[str, InferenceRoute]:
        """Return the routes at which models make something, by their paths."""
        kernel, prefix = self._kernel, self._settings.link_prefix
        apis: dict[str, tuple[RelayedApi[Any], _Form | None]] = {
            "/v1/images/generations": (ImagesApi(self._store), _NO_FORM),
            "/v1/images/edits": (EditsApi(self._store), _Form(EDIT_FORM)),
            "/v1/audio/speech": (SpeechApi(), _NO_FORM),
            "/v1/audio/transcriptions": (TranscriptionsApi(), _Form(TRANSCRIPT_FORM, is_sound=True)),
            "/v1/audio/translations": (TranslationsApi(), _Form(TRANSCRIPT_FORM, is_sound=True)),
            "/v1/videos": (VideosApi(self._store), _Form(VIDEO_FORM)),
        }
        return {
            path: InferenceRoute(
                RelayCall(api, kernel.pipeline, self.intake, prefix),
                access=Access.MEDIA,
                body_limit_bytes=kernel.pipeline.settings.limits.body_limit_bytes,
                budget=kernel.budget,
                form=None if form is None else FormDoor(form.shape, self._limit(form), kernel.offload),
            )
            for path, (api, form) in apis.items()
        }

    def routes(self) -> Sequence[GuardedRoute]:
        """Return the routes to what is kept."""
        one, media = "/v1/videos/{video_id}", Access.MEDIA
        found = [
            GuardedRoute("/v1/videos", VideoListRoute(self._store), "GET", access=media),
            GuardedRoute(one, VideoRoute(self._store), "GET", "DELETE", access=media),
            GuardedRoute(one + "/content", VideoContentRoute(self._store), "GET", access=media),
        ]
        if self._store is not None:  # the link itself is the key
            found.append(GuardedRoute(MEDIA_PATH, MediaLinkRoute(self._store), "GET", access=Access.OPEN))
        return found

    def described(self) -> Sequence[ApiDescription]:
        return (IMAGES_API, AUDIO_API, VIDEOS_API)

    async def aclose(self) -> None:
        await self.intake.aclose()

    def _limit(self, form: _Form) -> FormLimit:
        if form.is_sound:
            return FormLimit(self._settings.sound_form_bytes, "DYN_HTTP_AUDIO_FORM_LIMIT_MB")
        return FormLimit(self._settings.image_form_bytes, "DYN_HTTP_IMAGE_FORM_LIMIT_MB")

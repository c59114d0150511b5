"""The routes of raw engines: pictures, sound and videos, each with the forms it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.media.apis.audio import SpeechApi, TranscriptionsApi, TranslationsApi
from dynamo.frontend.parts.media.apis.images import EditsApi, ImagesApi
from dynamo.frontend.parts.media.apis.videos import VideosApi
from dynamo.frontend.parts.media.forms import FormDoor, FormLimit
from dynamo.frontend.parts.media.intake import MediaIntake
from dynamo.frontend.parts.media.kept_routes import MediaLinkRoute, VideoContentRoute, VideoListRoute, VideoRoute
from dynamo.frontend.parts.media.metrics import FAMILIES
from dynamo.frontend.parts.media.relay import RelayCall
from dynamo.frontend.parts.media.relay_api import RelayedApi
from dynamo.frontend.parts.media.store import MEDIA_PATH, KeepLimits, MediaStore
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.protocol.audio.schema import AUDIO_API
from dynamo.protocol.audio.transcripts import TRANSCRIPT_FORM
from dynamo.protocol.forms import FormShape
from dynamo.protocol.image_answers import IMAGES_API
from dynamo.protocol.images import EDIT_FORM
from dynamo.protocol.openai.schema import ApiDescription
from dynamo.protocol.videos import VIDEO_FORM, VIDEOS_API


class _Form(NamedTuple):
    """The forms of one route: what their fields are, and which limit holds for them."""

    shape: FormShape
    is_sound: bool = False


_NO_FORM: Final = None


class MediaService(Part):
    """The media of requests, and the routes of models that make some."""

    name: ClassVar[str] = "media"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, settings: MediaSettings, kernel: Kernel, intake: MediaIntake) -> None:
        """Raises InvalidArgument for a media store that cannot be used."""
        self._settings, self._kernel, self.intake = settings, kernel, intake
        self._store: MediaStore | None = None
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

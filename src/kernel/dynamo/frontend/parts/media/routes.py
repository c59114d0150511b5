"""The routes of raw engines: pictures, sound and videos, each with the forms it takes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from starlette.types import ASGIApp

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.http.forms import FormDoor, FormLimit
from dynamo.frontend.http.inference_route import InferenceRoute
from dynamo.frontend.parts.media.apis.audio import SpeechApi, TranscriptionsApi, TranslationsApi
from dynamo.frontend.parts.media.apis.images import EditsApi, ImagesApi
from dynamo.frontend.parts.media.apis.videos import VideosApi
from dynamo.frontend.parts.media.kept_routes import MediaLinkRoute, VideoContentRoute, VideoListRoute, VideoRoute
from dynamo.frontend.parts.media.store import MEDIA_PATH, KeepLimits, MediaStore
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.pipeline.relay import RelayCall
from dynamo.frontend.pipeline.relay_api import RelayedApi
from dynamo.protocol.audio.transcripts import TRANSCRIPT_FORM
from dynamo.protocol.forms import FormShape
from dynamo.protocol.images import EDIT_FORM
from dynamo.protocol.videos import VIDEO_FORM

__all__ = ["MediaRoutes"]


class _Form(NamedTuple):
    """The forms of one route: what their fields are, and which limit holds for them."""

    shape: FormShape
    is_sound: bool = False


_NO_FORM: Final = None


class MediaRoutes:
    """Makes the routes over the parts of one frontend."""

    def __init__(self, pipeline: Pipeline, budget: BodyBudget, offload: Offload) -> None:
        """Raises InvalidArgument for a media store that cannot be used."""
        self._pipeline, self._budget, self._offload = pipeline, budget, offload
        self._settings = settings = pipeline.settings.media
        self._store: MediaStore | None = None
        if settings.store_dir is not None:
            limits = KeepLimits(settings.store_bytes, settings.store_seconds)
            self._store = MediaStore(settings.store_dir.expanduser(), limits)

    def inference(self) -> dict[str, InferenceRoute]:
        """Return the routes at which models make something, by their paths."""
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
                RelayCall(api, self._pipeline),
                access=Access.MEDIA,
                body_limit_bytes=self._pipeline.settings.limits.body_limit_bytes,
                budget=self._budget,
                form=None if form is None else FormDoor(form.shape, self._limit(form), self._budget, self._offload),
            )
            for path, (api, form) in apis.items()
        }

    def kept(self) -> dict[str, tuple[ASGIApp, tuple[str, ...], Access]]:
        """Return the routes to what is kept: path, application, methods, access."""
        found: dict[str, tuple[ASGIApp, tuple[str, ...], Access]] = {
            "/v1/videos": (VideoListRoute(self._store), ("GET",), Access.MEDIA),
            "/v1/videos/{video_id}": (VideoRoute(self._store), ("GET", "DELETE"), Access.MEDIA),
            "/v1/videos/{video_id}/content": (VideoContentRoute(self._store), ("GET",), Access.MEDIA),
        }
        if self._store is not None:
            found[MEDIA_PATH] = MediaLinkRoute(self._store), ("GET",), Access.OPEN  # the link itself is the key
        return found

    def _limit(self, form: _Form) -> FormLimit:
        if form.is_sound:
            return FormLimit(self._settings.sound_form_bytes, "DYN_HTTP_AUDIO_FORM_LIMIT_MB")
        return FormLimit(self._settings.image_form_bytes, "DYN_HTTP_IMAGE_FORM_LIMIT_MB")

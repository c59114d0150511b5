"""From the media of a request to the fields of the worker's request: the models that take them, their content, their hashes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Final, Literal, Protocol

from dynamo.errors import Cancelled, Overloaded
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.settings.media import FetchRules, MediaSettings
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.parts.media.addresses import MediaRefused, shown_url
from dynamo.frontend.parts.media.content import Media, media_type, read_media
from dynamo.frontend.parts.media.fetcher import PartFetcher, Resolve, resolve_host
from dynamo.frontend.parts.media.metrics import MediaMetrics
from dynamo.frontend.pipeline.plan import WorkRequest
from dynamo.kv.media_routing import expand_images
from dynamo.protocol.batches.objects import FileObject
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.media_parts import refused_part
from dynamo.protocol.openai.shapes import MediaPart, RequestMedia
from dynamo.protocol.records import ENCODER_HANDOFF, MEDIA_KINDS
from dynamo.router.dispatch.encode import EncodeStage
from dynamo.router.dispatch.stages import PrefillStage
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.calls.context import Context

logger = logging.getLogger(__name__)

PURPOSES: Final = ("vision", "user_data", "assistants")

PARTS_AT_ONCE: Final = 4  # of one request that are fetched at the same time: many slow ones delay no other request
_ANY_KIND: Final = frozenset({"image", "video", "audio"})
_KEY: Final = {"image": "image_url", "video": "video_url", "audio": "audio_url"}


class FileSource(Protocol):
    """What is needed of the store of files."""

    async def open(self, id: str, owner: str) -> tuple[int, FileObject]:
        """Open a file for reading; return its descriptor, which the caller closes. Raises RequestRejected."""


class UploadedParts:
    """Puts the content of uploaded files in place of their ids."""

    def __init__(self, files: FileSource | None, offload: Offload, *, max_bytes: int, max_pixels: int) -> None:
        """`files`: None where files are switched off."""
        self._files, self._offload = files, offload
        self._max_bytes, self._max_pixels = max_bytes, max_pixels

    async def fill(self, media: RequestMedia, owner: str) -> None:
        """Read the files that a request names. Raises RequestRejected (400) that names the part."""
        for place, part in enumerate(media.parts):
            if part.file_id is not None:
                media.parts[place] = await self._filled(part, part.file_id, owner)

    async def _filled(self, part: MediaPart, id: str, owner: str) -> MediaPart:
        if self._files is None:
            raise refused_part(part.where, "files are switched off here (--files-dir): send the content, or its URL")
        try:
            opened, file = await self._files.open(id, owner)
        except RequestRejected as error:
            raise refused_part(part.where, error.message) from None
        try:
            if file.purpose not in PURPOSES:
                wanted = ", ".join(PURPOSES)
                raise refused_part(part.where, f"the purpose of the file is {file.purpose}, and not one of {wanted}")
            if file.bytes > self._max_bytes:
                raise refused_part(
                    part.where, f"the file has more than the {self._max_bytes} bytes allowed (DYN_MM_MAX_FILE_SIZE_MB)"
                )
            data = await asyncio.to_thread(_read_all, opened, file.bytes)
        finally:
            os.close(opened)
        kind = _kind_of(part, data)
        try:
            read: Media = await self._offload(partial(read_media, data, kind, max_pixels=self._max_pixels))
        except MediaRefused as error:
            raise refused_part(part.where, f"file {id[:128]}: {error}") from None
        return MediaPart(kind, read.url, part.uuid, part.where, is_upload=True)


def _kind_of(part: MediaPart, data: bytes) -> Literal["image", "video", "audio"]:
    """Return what a file is, and mark for the template where it stands. Raises RequestRejected for no media."""
    assert part.shown is not None
    if part.shown["type"] != "file":
        return part.kind
    found = (media_type(data[:16]) or "").partition("/")[0]
    kinds: dict[str, Literal["image", "video", "audio"]] = {"image": "image", "video": "video", "audio": "audio"}
    if found not in kinds:
        raise refused_part(part.where, "the file is no image, video or sound in a format that is taken")
    part.shown["type"] = kinds[found]
    return kinds[found]


def _read_all(opened: int, size: int) -> bytes:
    pieces: list[bytes] = []
    begin = 0
    while begin < size and (piece := os.pread(opened, size - begin, begin)):
        pieces.append(piece)
        begin += len(piece)
    return b"".join(pieces)


class MediaIntake:
    """Shared by the inference APIs; keeps what requests in flight hold in sum."""

    def __init__(
        self, settings: MediaSettings, offload: Offload, metrics: MediaMetrics, *, resolve: Resolve = resolve_host
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._uploads = self._uploads_of(None, offload)
        self._offload = offload
        self.fetcher = PartFetcher(settings, offload, metrics.fetched, resolve=resolve)
        self.held_bytes = 0
        self._warned: set[tuple[str, str]] = set()  # (model, what about)

    async def aclose(self) -> None:
        """End every fetch. Idempotent."""
        await self.fetcher.aclose()

    def serve_files(self, files: FileSource) -> None:
        """Let parts name files of this store from now on."""
        self._uploads = self._uploads_of(files, self._offload)

    def _uploads_of(self, files: FileSource | None, offload: Offload) -> UploadedParts:
        settings = self._settings
        return UploadedParts(files, offload, max_bytes=settings.file_bytes, max_pixels=settings.pixels)

    async def take_files(self, media: RequestMedia, owner: str | None) -> None:
        """Put the content of uploaded files in place of their ids. Raises RequestRejected (400) that names a part."""
        await self._uploads.fill(media, owner or "")

    def check_model(self, model: ServedModel, media: RequestMedia) -> None:
        """Refuse media that the model does not take, before anything is fetched.

        Raises RequestRejected: 400 naming the first such part, or 422 for a model that takes text.
        """
        if model.takes_text:
            raise not_built(
                f"Validation: media for '{model.name}', whose worker takes text, are not supported by this version",
                media.parts[0].where,
            )
        accepted = accepted_kinds(model)
        for part in media.parts:
            if part.kind not in accepted:
                others = f" It takes {' and '.join(sorted(accepted))}." if accepted else ""
                message = f"the model '{model.name}' does not take {part.kind} input.{others}"
                raise refused_part(part.where, message)
        if len(media.parts) > self._settings.parts:
            raise refused_part(
                media.parts[self._settings.parts].where,
                f"at most {self._settings.parts} parts of media are taken in one request (DYN_MM_MAX_PARTS)",
            )

    async def fill(
        self, media: RequestMedia, model: ServedModel, work: WorkRequest, text: str | None, context: Context
    ) -> None:
        """Get the content of the parts, write the fields of the worker's request, and count the tokens of its images.

        Raises RequestRejected (400) that names a part, Overloaded, Cancelled when `context` ends first.
        """
        contents = await self.contents(media, model, context)
        fields = work.plan.fields
        slots: dict[str, list[object]] = {}
        uuids: dict[str, list[str | None]] = {}
        for part, content in zip(media.parts, contents, strict=True):
            key = _KEY[part.kind]
            slots.setdefault(key, []).append(_slot(part, content))
            uuids.setdefault(key, []).append(part.uuid)
        members: dict[str, object] = {"multi_modal_data": slots}
        if any(part.uuid is not None for part in media.parts):
            members["multi_modal_uuids"] = {key: named for key, named in uuids.items() if any(named)}
        extra = {**(fields.extra_args or {}), "messages": media.messages}
        if text is not None:
            extra["formatted_prompt"] = text
        known = [content for content in contents if content is not None]
        is_named = len(known) == len(contents) and all(part.uuid is None for part in media.parts)
        if is_named:  # else the engine's cache goes by names of the client's
            extra["mm_hashes"] = [f"{content.content_hash:016x}" for content in known]
        self._warn_of_template(model)
        expanded = self._expand(media.parts, known, model, work.plan.prompts[0]) if is_named else None
        image_tokens = 0
        if expanded is not None:
            image_tokens, members["mm_routing_info"] = expanded
        if image_tokens:
            work.tally.note_images(image_tokens, len(media.parts))
        fields.extra_args, fields.media = extra, members
        self._metrics.observe(media.parts, image_tokens)

    # -- the content -------------------------------------------------------------------------------------------------

    async def contents(self, media: RequestMedia, model: ServedModel, context: Context) -> Sequence[Media | None]:
        """Return the content of each part, None for one that is passed on by its URL or uuid. They are held until `media.end()`.

        Raises as `fill`.
        """
        rules = FetchRules.of(model.card.media_fetcher, allow_internal=self._settings.allow_internal)
        contents = await self._contents(media, rules, context)
        self._check_limits(media, contents, model)
        self._hold(media, contents)
        cache = self.fetcher.cache
        self._metrics.kept(cache.bytes, len(cache))
        return contents

    async def _contents(self, media: RequestMedia, rules: FetchRules, context: Context) -> Sequence[Media | None]:
        """Return the content of each part, None for one that is passed on by its URL or uuid."""
        first = media.parts[0]
        if len(media.parts) == 1 and (first.url is None or first.url[:5].lower() == "data:"):
            return [await self._content(first, rules, media.owner)]  # nothing to wait for
        places = asyncio.Semaphore(PARTS_AT_ONCE)

        async def one(part: MediaPart) -> Media | None:
            async with places:
                return await self._content(part, rules, media.owner)

        found: list[Media | None] = []

        async def fetch() -> None:
            found.extend(await _together([one(part) for part in media.parts]))

        if await first_of(fetch(), context.async_killed_or_stopped()):
            raise Cancelled("the request ended before its media were there")
        return found

    async def _content(self, part: MediaPart, rules: FetchRules, owner: str) -> Media | None:
        if part.url is None:
            return None
        try:
            if self._settings.fetch == "worker" and part.url[:5].lower() != "data:":
                self.fetcher.check(part.url, rules)
                return None
            return await self.fetcher.content(part.url, part.kind, rules, owner=owner, is_upload=part.is_upload)
        except MediaRefused as error:
            reason = str(error)
        # Outside the handler: the frames of the fetch, with what they hold, must not live on as the context of this error.
        self._metrics.refused()
        raise refused_part(part.where, f"{part.kind}_url {shown_url(part.url)}: {reason}")

    def _check_limits(self, media: RequestMedia, contents: Sequence[Media | None], model: ServedModel) -> None:
        """Raise RequestRejected for what is too much together, or more than the card's decoder takes."""
        total = 0
        for part, content in zip(media.parts, contents, strict=True):
            if content is None:
                continue
            total += content.size
            if total > self._settings.request_bytes:
                limit = self._settings.request_bytes
                raise refused_part(
                    part.where, f"the media have more than {limit} bytes together (DYN_MM_MAX_REQUEST_MB)"
                )
            if part.kind == "image" and (fault := _decoder_fault(model.card.media_decoder, content)) is not None:
                raise refused_part(part.where, fault)

    def _hold(self, media: RequestMedia, contents: Sequence[Media | None]) -> None:
        """Count what the request holds until its end. Raises Overloaded where all requests would hold too much."""
        size = sum(len(content.url) for content in contents if content is not None)
        if self.held_bytes + size > self._settings.held_bytes:
            raise Overloaded("The media of the requests in flight exceed the limit set by DYN_MM_MAX_HELD_MB")
        self.held_bytes += size
        self._metrics.held(self.held_bytes)

        def release() -> None:
            self.held_bytes -= size
            self._metrics.held(self.held_bytes)

        media.on_end = release

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _expand(
        self, parts: Sequence[MediaPart], contents: Sequence[Media], model: ServedModel, prompt: list[int]
    ) -> tuple[int, dict[str, object]] | None:
        """Return how many tokens the images become, and what routers hash in place of the prompt; None: it is not known."""
        tokens = model.text.media
        if tokens.image_token_id is None or tokens.count_image is None or any(part.kind != "image" for part in parts):
            self._warn(
                model, "how many tokens its images become is not known: requests are routed by the text around them"
            )
            return None
        images: list[tuple[int, int]] = []
        for content in contents:
            count = tokens.count_image(content.width, content.height)
            if count is None:
                return None
            images.append((content.content_hash, count))
        found = expand_images(prompt, tokens.image_token_id, images, model.card.kv_cache_block_size)
        if found is None:
            self._warn(model, "its prompts do not have one placeholder for each image: they are routed by their text")
            return None
        hashed = {"routing_token_ids": found.token_ids, "block_mm_infos": [], "expanded_prompt_len": found.length}
        return sum(count for _, count in images), hashed

    def _warn_of_template(self, model: ServedModel) -> None:
        if not model.text.template.reads_parts:
            self._warn(model, "its chat template has no place for media: they are left out of the text of prompts")
        if model.card.media_decoder is not None:
            self._warn(model, "its card asks for decoded media, which this version does not make: it gets data URLs")

    def _warn(self, model: ServedModel, what: str) -> None:
        """Log something about a model once."""
        if (model.name, what) not in self._warned and len(self._warned) < 1000:
            self._warned.add((model.name, what))
            logger.warning("model %s: %s", model.name, what)


def accepted_kinds(model: ServedModel) -> frozenset[str]:
    """Return the kinds of media that a model takes, as its cards and files define.

    A `media_decoder` names them; else the entry `media` of the runtime data of the workers that get the media; else, where
    media go to encode workers first, any; else what config.json has tokens for.
    """
    decoder = model.card.media_decoder
    if isinstance(decoder, Mapping):
        return frozenset(decoder)
    stages = model.dispatcher.stages
    configs = [
        model.runtime_config,
        *(stage.router.workers.runtime_config for stage in stages if isinstance(stage, EncodeStage | PrefillStage)),
    ]
    declared = [config.runtime_data[MEDIA_KINDS] for config in configs if MEDIA_KINDS in config.runtime_data]
    if declared:
        lists = [each for each in declared if isinstance(each, list)]
        return frozenset(kind for each in lists for kind in each if isinstance(kind, str))
    if any(config.runtime_data.get(ENCODER_HANDOFF) is True for config in configs):
        return _ANY_KIND
    return model.text.media.kinds


def _slot(part: MediaPart, content: Media | None) -> dict[str, str]:
    if content is not None:
        return {"Url": content.url}
    if part.url is not None:
        return {"Url": part.url}
    assert part.uuid is not None
    return {"UuidOnly": part.uuid}


def _decoder_fault(decoder: object, content: Media) -> str | None:
    """Return why an image is more than the decoder of a card takes; None: it is not."""
    options = decoder.get("image") if isinstance(decoder, Mapping) else None
    limits = options.get("limits") if isinstance(options, Mapping) else None
    if not isinstance(limits, Mapping):
        return None
    for name, value in (
        ("max_image_width", content.width),
        ("max_image_height", content.height),
        ("max_alloc", content.width * content.height * 3),
    ):
        limit = limits.get(name)
        if isinstance(limit, int) and value > limit:
            return (
                f"an image of {content.width} x {content.height} pixels is more than this model takes ({name} {limit})"
            )
    return None


async def _together(work: Sequence[Coroutine[None, None, Media | None]]) -> list[Media | None]:
    """Run all of it; the first failure ends the others and is raised."""
    tasks: list[asyncio.Task[Media | None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        tasks.clear()  # one of them has the error, whose traceback has this frame
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]

"""Loads the text model of a card: its files, its chat template, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from time import thread_time

from dynamo.frontend.base.offload import Offload, ThreadOffload
from dynamo.frontend.models.files import ModelFiles
from dynamo.frontend.models.settings import ModelSettings
from dynamo.protocol.records import IMAGE_PROCESSOR, ModelCard
from dynamo.text.model import TextModel, load_text_model
from dynamo.text.template_sandbox import NO_CLOCK


class TextModelLoader:
    """Loads in threads of its own: whatever a card names must not keep prompts waiting for a thread."""

    def __init__(self, settings: ModelSettings, offload: Offload | None, *, now: Callable[[], datetime]) -> None:
        """`offload`: in place of threads. `now` is the clock that chat templates may print."""
        self._settings = settings
        self._now = now
        # CPU time of the rendering thread, so that a busy machine refuses nothing; none under virtual time.
        self._template_clock = thread_time if offload is None else NO_CLOCK
        self._offload: Offload = ThreadOffload(settings.concurrent_model_loads) if offload is None else offload
        self._files = ModelFiles(settings.model_cache_dir, settings.model_files)

    async def load(self, card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        """Return the text model of a card, with the files that `worker_hosts` may serve."""
        return await self._offload(lambda: self._load(card, worker_hosts))

    def close(self) -> None:
        """Let the threads end."""
        self._offload.close()

    def _load(self, card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        sources = self._files.collect(card, worker_hosts)
        template, named = sources.custom_template, sources.named_templates
        if self._settings.custom_jinja_template is not None:
            with open(self._settings.custom_jinja_template, encoding="utf-8") as file:
                template, named = file.read(), {}
        processor = card.runtime_config.runtime_data.get(IMAGE_PROCESSOR)
        return load_text_model(
            sources.directory,
            custom_template=template,
            named_templates=named,
            now=self._now,
            template_budget=self._settings.template_budget,
            template_clock=self._template_clock,
            tokenizer_cache_bytes=self._settings.tokenizer_cache_bytes,
            image_processor=processor if isinstance(processor, Mapping) else None,
        )

"""The encode worker of the reference engine: it turns the media of a request into tokens, and computes nothing else."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from dynamo.contract.args import worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, final_chunk, usage
from dynamo.contract.health_check import build_health_check_payload
from dynamo.contract.modes import EmbeddingTransferMode
from dynamo.contract.requests.multimodal import encoder_terminal_chunk
from dynamo.errors import Cancelled, EngineShutdown
from dynamo.reference.config import ModelConfig, read_model_config
from dynamo.reference.flags import read_arguments
from dynamo.reference.handover import EncodedSender
from dynamo.reference.media import EncodedMedia, MediaItem, MediaOptions
from dynamo.runtime.base.tasks import SingleFlight
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.metrics import TypedFamily

CACHE_METRICS: Final = "reference_encoder_cache"
_ENTRY_BYTES: Final = 300  # of a digest and its place
_TOKEN_BYTES: Final = 40  # of a number and its place in a tuple


class EncodedCache:
    """The tokens of parts by the digest of their content, the least recently used first out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tokens: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self.bytes = 0
        self.hits = self.misses = self.evictions = 0

    def find(self, digest: str) -> tuple[int, ...] | None:
        """Return the tokens of a content that is kept."""
        found = self._tokens.get(digest)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._tokens.move_to_end(digest)
        return found

    def add(self, digest: str, tokens: tuple[int, ...]) -> None:
        """Keep the tokens of a content, within the bound."""
        if digest in self._tokens or _bytes_of(tokens) > self._max_bytes:
            return
        self._tokens[digest] = tokens
        self.bytes += _bytes_of(tokens)
        while self.bytes > self._max_bytes:
            self.bytes -= _bytes_of(self._tokens.popitem(last=False)[1])
            self.evictions += 1


def _bytes_of(tokens: tuple[int, ...]) -> int:
    return _ENTRY_BYTES + _TOKEN_BYTES * len(tokens)


class ReferenceEncoder(LLMEngine):
    """Answers each request with one chunk that holds the digests of its media, and their tokens or a handle to them."""

    def __init__(
        self,
        directory: Path,
        media: MediaOptions,
        *,
        served_model_name: str | None = None,
        cache_bytes: int = 0,
        transfer: EmbeddingTransferMode | None = None,
    ) -> None:
        """`cache_bytes`: how much of what was encoded is kept, by the digest of its content. `transfer`: how what was encoded
        gets to the next worker; None: in the answer."""
        self._directory, self._media = directory, media
        self.cache = EncodedCache(cache_bytes)
        self._attempts: SingleFlight[str, tuple[int, ...]] = SingleFlight()
        self._waiting: dict[str, list[Context]] = {}  # the requests that need a content, by its digest
        self._name = served_model_name or directory.resolve().name
        self._config: ModelConfig | None = None
        self._sender = EncodedSender(transfer)
        self.encoded = 0  # parts that were not in the cache

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        args, _, role = read_arguments(argv, may_encode=True)
        gigabytes = args.multimodal_embedding_cache_capacity_gb or 0.0
        engine = cls(
            args.model,
            role.media,
            served_model_name=args.served_model_name,
            cache_bytes=int(gigabytes * 2**30),
            transfer=args.embedding_transfer_mode,
        )
        return engine, worker_config_from(args, model_name=str(engine._directory), served_model_name=engine._name)

    async def start(self, worker_id: int) -> EngineConfig:
        if self._sender.is_closed:
            raise EngineShutdown("this engine was cleaned up; make a new one")
        self._sender.start()
        self._config = await asyncio.to_thread(read_model_config, self._directory)
        return EngineConfig(model=self._name, served_model_name=self._name)

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        config = self._config
        if config is None or self._sender.is_closed:
            raise EngineShutdown("the reference encoder is not running")
        counts = usage(len(request["token_ids"]), 0)
        items = await asyncio.to_thread(self._media.parts_of, request)
        try:
            tokens = [await self._encoded(item, config, context) for item in items]
        except Cancelled:
            yield final_chunk("cancelled", usage=counts)
            return
        found = EncodedMedia(tuple(item.digest for item in items), tuple(tokens))
        if context.is_stopped():
            yield final_chunk("cancelled", usage=counts)
            return
        yield encoder_terminal_chunk(await self._sender.result(found), completion_usage=counts)

    async def _encoded(self, item: MediaItem, config: ModelConfig, context: Context) -> tuple[int, ...]:
        """Return the tokens of a part, from the cache where it was encoded before; once for all requests at the same time.

        Raises Cancelled once all of these have ended.
        """
        if (known := self.cache.find(item.digest)) is not None:
            return known
        waiting = self._waiting.setdefault(item.digest, [])

        async def encode() -> tuple[int, ...]:
            see = partial(self._media.tokens, item, config.vocab_size, config.vision)
            tokens = await asyncio.to_thread(see, lambda: all(each.is_stopped() for each in tuple(waiting)))
            self.encoded += 1
            self.cache.add(item.digest, tokens)
            return tokens

        waiting.append(context)
        try:
            while True:
                try:
                    return await self._attempts.run(item.digest, encode, f"encode {item.where}")
                except Cancelled:
                    if context.is_stopped():
                        raise  # else it came after the others had ended, and begins anew
        finally:
            waiting.remove(context)
            if not waiting:
                self._waiting.pop(item.digest, None)

    async def register_prometheus(self, metrics: Any) -> None:
        metrics.register_prometheus_typed_callback(partial(self._cache_metrics, metrics.auto_labels))

    def _cache_metrics(self, labels: Mapping[str, str]) -> list[TypedFamily]:
        cache, own = self.cache, [*labels.items()]
        return [
            (f"{CACHE_METRICS}_{name}", text, kind, [(f"{CACHE_METRICS}_{name}", own, value)])
            for name, kind, value, text in (
                ("hits_total", "counter", cache.hits, "Parts of media whose tokens were kept"),
                ("misses_total", "counter", cache.misses, "Parts of media that were not kept"),
                ("evictions_total", "counter", cache.evictions, "Contents that made room for others"),
                ("bytes", "gauge", cache.bytes, "What the kept contents take"),
            )
        ]

    async def cleanup(self) -> None:
        await self._sender.close()
        await self._attempts.close()

    async def health_check_payload(self) -> dict[str, object] | None:
        return build_health_check_payload(bos_token_id=0)

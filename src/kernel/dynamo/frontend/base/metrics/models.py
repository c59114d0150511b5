"""What a frontend shows of its models: their facts, workers and loads, and the caches of their tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.metrics.table import MODEL_FACTS
from dynamo.runtime.observe.metrics import Counter, Vector


class CacheTotals(Protocol):
    """The running totals of a tokenizer's cache."""

    hits: int
    misses: int
    cached_tokens: int
    uncached_tokens: int


class TokenizerCacheCounters:
    """Turns the running totals of tokenizer caches into counters, which never fall when a model is loaded anew."""

    def __init__(
        self, hits: Counter, misses: Counter, cached_tokens: Vector[Counter], uncached_tokens: Vector[Counter]
    ) -> None:
        self._hits, self._misses = hits, misses
        self._cached, self._uncached = cached_tokens, uncached_tokens
        self._seen: WeakKeyDictionary[CacheTotals, tuple[int, int, int, int]] = WeakKeyDictionary()

    def count(self, model: str, totals: CacheTotals) -> None:
        """Count what was added to `totals` since the last call with the same object."""
        now = (totals.hits, totals.misses, totals.cached_tokens, totals.uncached_tokens)
        before = self._seen.get(totals, (0, 0, 0, 0))
        counters = (self._hits, self._misses, self._cached.labels(model), self._uncached.labels(model))
        for counter, total, known in zip(counters, now, before, strict=True):
            counter.inc(max(0, total - known))
        self._seen[totals] = now


class ModelMetrics:
    """The gauges and counters of models and their workers."""

    def __init__(self, families: FrontendFamilies) -> None:
        self.card_conflicts = families.counters("model_card_conflicts_total")
        self.load_failures = families.counters("model_load_failures_total")
        self.tokenizer_cache = TokenizerCacheCounters(
            families.counter("tokenizer_cache_hits_total"),
            families.counter("tokenizer_cache_misses_total"),
            families.counters("tokenizer_cache_cached_tokens_total"),
            families.counters("tokenizer_cache_uncached_tokens_total"),
        )
        self._encoder_requests = families.counters("encoder_requests_total")
        self._encoder_fallbacks = families.counter("encoder_fallbacks_total")
        self._facts = {short: families.gauges(f"model_{short}") for short in MODEL_FACTS}
        self._workers = families.gauges("model_workers")
        self._worker_counts: Mapping[tuple[str, str], int] = {}

    def encoder_outcome(self, outcome: str) -> None:
        """Count what became of one request to an encode worker, or a request that went on without one (`fallback`)."""
        if outcome == "fallback":
            self._encoder_fallbacks.inc()
        else:
            self._encoder_requests.labels(outcome).inc()

    def forget(self, name: str) -> None:
        """Show a model that is gone as not ready."""
        self._facts["ready"].labels(name).set(0)

    def describe(self, name: str, values: Mapping[str, float | None]) -> None:
        """Set the `model_*` gauges; a key is the part after `model_`, None leaves a gauge alone."""
        for short, value in values.items():
            if value is not None:
                self._facts[short].labels(name).set(value)

    def count_workers(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the gauge of workers by (model, role); what was counted before and is not counted now becomes 0."""
        for key in self._worker_counts.keys() - counts.keys():
            self._workers.labels(*key).set(0)
        for key, count in counts.items():
            self._workers.labels(*key).set(count)
        self._worker_counts = counts

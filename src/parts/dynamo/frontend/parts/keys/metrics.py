"""What keys use, as metrics. The ids of the first 500 keys are labels, all further ones count as "other"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.parts.keys.quotas import TokenUse
from dynamo.runtime.observe.metrics import Counter, Family

FAMILIES: Final = (
    Family(
        "key_requests_total",
        "counter",
        "Requests of a [key](keys.md) that ended; `status` is `success` or `error`. The ids of the first 500 keys are labels, further ones are `other`",
        ("key_id", "model", "status"),
    ),
    Family(
        "key_tokens_total",
        "counter",
        "Tokens of a key; `kind` is `input`, `cached` (of the input) or `output`",
        ("key_id", "model", "kind"),
    ),
    Family(
        "key_rejections_total",
        "counter",
        "Requests that a key's limits refused, by the limit, or that came without a valid key, by `error.code` (`key_id` is `unknown` then)",
        ("key_id", "limit"),
    ),
    Family(
        "key_budget_remaining_ratio", "gauge", "The part of a key's budget that is left; set once a second", ("key_id",)
    ),
)


MAX_KEYS: Final = 500  # whose ids are labels; a series takes memory for as long as the process lives
OTHER: Final = "other"
UNKNOWN: Final = "unknown"  # stands for the id of a key that is not known
NO_MODEL: Final = "unknown_model"


class _KeySeries(NamedTuple):
    success: Counter
    error: Counter
    input: Counter
    cached: Counter
    output: Counter


class KeyMetrics:
    """The families of keys. Nothing is exposed before a key was used."""

    def __init__(self, families: FrontendFamilies) -> None:
        families = families.of(FAMILIES)
        self._requests = families.counters("key_requests_total")
        self._tokens = families.counters("key_tokens_total")
        self._rejections = families.counters("key_rejections_total")
        self._ratios = families.gauges("key_budget_remaining_ratio")
        self._labels: dict[str, str] = {}
        self._series: dict[tuple[str, str], _KeySeries] = {}

    def _label(self, id: str) -> str:
        label = self._labels.get(id)
        if label is None:
            if len(self._labels) >= MAX_KEYS:
                return OTHER
            label = self._labels[id] = id
        return label

    def count(self, id: str, model: str, use: TokenUse, *, is_success: bool) -> None:
        """Count a request of a key that is over; `model` is registered, or "" where it was not found."""
        series = self._series.get((id, model))
        if series is None:
            where = self._label(id), model or NO_MODEL
            series = self._series.get(where)
        if series is None:
            series = self._series[where] = _KeySeries(
                self._requests.labels(*where, "success"),
                self._requests.labels(*where, "error"),
                self._tokens.labels(*where, "input"),
                self._tokens.labels(*where, "cached"),
                self._tokens.labels(*where, "output"),
            )
        (series.success if is_success else series.error).inc()
        if use.input:
            series.input.inc(use.input)
        if use.cached:
            series.cached.inc(use.cached)
        if use.output:
            series.output.inc(use.output)

    def refused(self, id: str | None, limit: str) -> None:
        """Count a refusal; `limit` is one of a fixed set of names. None: of a key that is not known, or of none."""
        self._rejections.labels(UNKNOWN if id is None else self._label(id), limit).inc()

    def show_budgets(self, ratios: Iterable[tuple[str, float]]) -> None:
        """Show what is left of the budgets of keys, by their ids; those beyond the first 500 are not shown."""
        for id, ratio in ratios:
            label = self._label(id)
            if label != OTHER:
                self._ratios.labels(label).set(ratio)

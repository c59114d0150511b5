"""The thresholds above which a worker gets no requests, as settings of a frontend and of `python -m dynamo.router`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.router.workers.busy_workers import BusyThresholds
from dynamo.settings.readers import integer, number
from dynamo.settings.table import setting

_GROUP: Final = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySettings:
    """The limits of every model; None: ignored."""

    # fmt: off
    active_decode_blocks_threshold: float | None = setting(None, "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", number(0, 1),
        "A worker that reports more than this part (0 to 1) of its KV blocks gets no request; when all of a "
        "model do, 529. In a frontend for one model, and while it runs: [`/busy_threshold`](#busy-workers)",
        flag="--active-decode-blocks-threshold", group=_GROUP)
    active_prefill_tokens_threshold: int | None = setting(None, "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", integer(0),
        "Nor one that reports more prompt tokens under way than this",
        flag="--active-prefill-tokens-threshold", group=_GROUP)
    active_prefill_tokens_threshold_frac: float | None = setting(
        None, "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", number(0),
        "The same as a part of `max_num_batched_tokens`", flag="--active-prefill-tokens-threshold-frac", group=_GROUP)
    # fmt: on

    @property
    def busy_thresholds(self) -> BusyThresholds:
        """The limits of a model that has none of its own."""
        return BusyThresholds(
            "",
            self.active_decode_blocks_threshold,
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )

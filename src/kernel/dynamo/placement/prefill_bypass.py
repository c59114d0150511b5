"""Whether a prompt is computed where it is decoded, instead of by a prefill worker: the rules, and their verdict. Pure.

A prompt of which little is to be computed is sooner done by the decode worker than sent to a prefill worker and its blocks
back; and so is any prompt while prefill workers have too much to do.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

UNKNOWN_BATCH_TOKENS: Final = 10_000_000  # of a prefill worker whose card names no limit: it is hardly ever busy

BypassPolicy = Literal["isl_bounding", "prefill_load", "isl_or_load"]


class BypassRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When prefill workers are left out. The names are those of the native configuration."""

    policy: BypassPolicy = "isl_bounding"
    eff_isl_threshold: int = 2048
    """Tokens that the decode worker would have to compute; fewer are few."""
    eff_isl_ratio_threshold: float = 0.7
    """The same as a part of the prompt; both must hold."""
    prefill_busy_threshold: float | None = None
    """Prompt tokens under way at the prefill worker, as a part of `max_num_batched_tokens`; more is busy. None: what the
    queue of the router goes by (`with_default`)."""
    decode_busy_threshold: float | None = None
    """Blocks in use at the decode worker, as a part of its blocks; with more it computes no prompts. None: no such limit."""

    def __post_init__(self) -> None:
        for name in ("eff_isl_threshold", "eff_isl_ratio_threshold", "prefill_busy_threshold", "decode_busy_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:  # NaN is neither
                raise ValueError(f"{name} must be a number of at least 0, got {value}")

    def with_default(self, prefill_busy_threshold: float | None) -> BypassRules:
        """Return these rules with a threshold for prefill workers where they have none.

        Raises ValueError where they need one and there is none.
        """
        if self.prefill_busy_threshold is not None or not self.looks_at_prefill:
            return self
        if prefill_busy_threshold is None:
            raise ValueError(f"policy {self.policy} needs prefill_busy_threshold, or DYN_ROUTER_QUEUE_THRESHOLD")
        return msgspec.structs.replace(self, prefill_busy_threshold=prefill_busy_threshold)

    @property
    def looks_at_prefill(self) -> bool:
        """Whether the load of the prefill worker matters."""
        return self.policy != "isl_bounding"


class BypassFacts(msgspec.Struct, frozen=True, gc=False):
    """What is known of a prompt and of the workers that it would go to."""

    prompt_tokens: int
    cached_tokens: int  # at the decode worker, lower tiers weighted
    decode_blocks: float  # in use there with this prompt, its unfinished last block included
    total_kv_blocks: int | None = None  # of the decode worker
    prefill_tokens: int = 0  # under way at the prefill worker
    max_num_batched_tokens: int | None = None  # of the prefill worker


class BypassVerdict(msgspec.Struct, frozen=True, gc=False):
    """Whether the prefill workers are left out, and why."""

    bypasses: bool
    reason: Literal["short", "prefill_busy", "long", "decode_busy"]
    summary: str
    worker_id: int = 0  # the decode worker that was considered
    prompt_tokens: int = 0
    cached_tokens: int = 0


def judge_bypass(rules: BypassRules, facts: BypassFacts, worker_id: int = 0) -> BypassVerdict:
    """Decide for one prompt. `worker_id`: of the decode worker, for the summary."""
    cached = min(facts.prompt_tokens, facts.cached_tokens)
    left = facts.prompt_tokens - cached
    part = left / max(1, facts.prompt_tokens)
    is_short = left < rules.eff_isl_threshold and part < rules.eff_isl_ratio_threshold
    said = (
        f"{left} of the prompt's {facts.prompt_tokens} tokens ({part:.0%}) are to be computed at decode worker "
        f"{worker_id:x}; few are fewer than {rules.eff_isl_threshold} and {rules.eff_isl_ratio_threshold:.0%}"
    )

    def verdict(
        bypasses: bool, reason: Literal["short", "prefill_busy", "long", "decode_busy"], text: str
    ) -> BypassVerdict:
        end = "the decode worker computes it" if bypasses else "a prefill worker computes it"
        return BypassVerdict(bypasses, reason, f"{text}: {end}.", worker_id, facts.prompt_tokens, cached)

    is_prefill_busy = False
    if rules.looks_at_prefill and rules.prefill_busy_threshold is not None:
        limit = rules.prefill_busy_threshold * (facts.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS)
        is_prefill_busy = facts.prefill_tokens > limit
        if rules.policy == "prefill_load":
            said = f"{facts.prefill_tokens} prompt tokens are under way at the prefill worker, the limit is {limit:g}"
        else:
            said += (
                f"; {facts.prefill_tokens} prompt tokens are under way at the prefill worker, the limit is {limit:g}"
            )
    if not (is_prefill_busy or (is_short and rules.policy != "prefill_load")):
        return verdict(False, "long", said)
    if rules.decode_busy_threshold is not None:
        total = facts.total_kv_blocks
        if not total or facts.decode_blocks > rules.decode_busy_threshold * total:
            room = "an unknown number of" if not total else f"{total}"
            said += f"; but decode worker {worker_id:x} would use {facts.decode_blocks:g} of {room} blocks"
            return verdict(False, "decode_busy", said)
    return verdict(True, "short" if is_short and rules.policy != "prefill_load" else "prefill_busy", said)

"""Which prompts are computed where they are decoded."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.placement.prefill_bypass import BypassFacts, BypassRules, judge_bypass
from support.cases import each_case


def rules(policy: str = "isl_bounding", **more: Any) -> BypassRules:
    return BypassRules(policy=policy, **more)  # type: ignore[arg-type]


def facts(prompt: int, cached: int, **more: Any) -> BypassFacts:
    return BypassFacts(prompt, cached, more.pop("decode_blocks", 10.0), **more)


BUSY = {"prefill_tokens": 801, "max_num_batched_tokens": 400}
NOT_BUSY = {"prefill_tokens": 800, "max_num_batched_tokens": 400}


@each_case(
    ("rule", "fact", "expected"),
    [
        (rules(), facts(100, 31), (True, "short")),
        (rules(), facts(100, 30), (False, "long")),  # 0.7 is not below 0.7
        (rules(), facts(100, 0), (False, "long")),
        (rules(), facts(10_000, 10_000 - 2047), (True, "short")),
        (rules(), facts(10_000, 10_000 - 2048), (False, "long")),
        (rules(), facts(100, 1_000), (True, "short")),  # never more cached than asked for
        (rules(eff_isl_threshold=10), facts(100, 90), (False, "long")),
        (rules(eff_isl_ratio_threshold=1.1), facts(100, 0), (True, "short")),
        (rules(eff_isl_ratio_threshold=0.0), facts(100, 100), (False, "long")),
        # The load of the prefill worker is looked at by the other two only.
        (rules(), facts(100, 0, **BUSY), (False, "long")),
        (rules("prefill_load", prefill_busy_threshold=2.0), facts(100, 0, **BUSY), (True, "prefill_busy")),
        (rules("prefill_load", prefill_busy_threshold=2.0), facts(100, 0, **NOT_BUSY), (False, "long")),
        (rules("prefill_load", prefill_busy_threshold=2.0), facts(100, 90, **NOT_BUSY), (False, "long")),
        (
            rules("prefill_load", prefill_busy_threshold=0.1),
            facts(100, 0, prefill_tokens=1_000_000),  # of a worker that names no limit: ten millions
            (False, "long"),
        ),
        (rules("isl_or_load", prefill_busy_threshold=2.0), facts(100, 90, **NOT_BUSY), (True, "short")),
        (rules("isl_or_load", prefill_busy_threshold=2.0), facts(100, 0, **BUSY), (True, "prefill_busy")),
        (rules("isl_or_load", prefill_busy_threshold=2.0), facts(100, 0, **NOT_BUSY), (False, "long")),
        # A busy decode worker computes nothing, and one of unknown size is not known to be idle.
        (rules(decode_busy_threshold=0.5), facts(100, 90, decode_blocks=50.0, total_kv_blocks=100), (True, "short")),
        (
            rules(decode_busy_threshold=0.5),
            facts(100, 90, decode_blocks=51.0, total_kv_blocks=100),
            (False, "decode_busy"),
        ),
        (rules(decode_busy_threshold=0.5), facts(100, 90, decode_blocks=0.0), (False, "decode_busy")),
    ],
)
def test_the_verdict(rule: BypassRules, fact: BypassFacts, expected: tuple[bool, str]) -> None:
    verdict = judge_bypass(rule, fact, 0xAB)
    assert (verdict.bypasses, verdict.reason) == expected
    assert ("the decode worker computes it" in verdict.summary) == expected[0]


@each_case(
    ("members", "named"),
    [
        ({"eff_isl_threshold": -1}, "eff_isl_threshold"),
        ({"eff_isl_ratio_threshold": float("nan")}, "eff_isl_ratio_threshold"),
        ({"prefill_busy_threshold": -0.1}, "prefill_busy_threshold"),
        ({"decode_busy_threshold": float("inf")}, "decode_busy_threshold"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_by_name(members: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BypassRules(**members)


def test_the_threshold_of_prefill_workers_is_that_of_the_queue_unless_given() -> None:
    assert rules().with_default(None) == rules().with_default(2.0) == rules()
    assert rules("prefill_load").with_default(2.0) == rules("prefill_load", prefill_busy_threshold=2.0)
    given = rules("isl_or_load", prefill_busy_threshold=1.0)
    assert given.with_default(2.0) == given.with_default(None) == given
    for policy in ("prefill_load", "isl_or_load"):
        with pytest.raises(ValueError, match=f"{policy} needs prefill_busy_threshold"):
            rules(policy).with_default(None)

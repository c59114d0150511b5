"""The filter language: what it holds for, and that no text is more than a typed error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.protocol.inspector.filters import FIELDS, FIGURES, MARKS, FilterError, parse_filter
from dynamo.protocol.inspector.views import RecentView, StreamView, WorkerView
from support.cases import each_case

NOW = 1_800_000_000_000


def stream(**members: Any) -> StreamView:
    base = {"id": "chatcmpl-52A1", "frontend": "f", "endpoint": "chat_completions", "phase": "decode", "model": "demo"}
    times = {"started_ms": NOW - 41_000, "phase_ms": NOW - 40_000}
    return StreamView(**{**base, **times, **members})


def recent(**members: Any) -> RecentView:
    base = {"id": "cmpl-1", "frontend": "f", "endpoint": "completions", "status": 503, "outcome": "failed"}
    return RecentView(**{**base, "started_ms": NOW - 60_000, "ended_ms": NOW - 58_000, **members})


def worker(**members: Any) -> WorkerView:
    base = {"id": "7e9f", "role": "agg", "models": ["demo", "demo-lora"], "address": "h:1", "wire": "mux"}
    return WorkerView(**{**base, "state": "ready", **members})


HOLDS = [
    ("", stream(), True),
    ("model:demo", stream(), True),
    ("MODEL:demo", stream(), False),  # not a field, so a part of an id
    ("model:DEMO", stream(), True),
    ("model:dem", stream(), False),
    ("model:d*o", stream(), True),
    ("!model:demo", stream(), False),
    ("model:demo-lora", worker(), True),
    ("key:team-a", stream(key="team-a"), True),
    ("key:team-a", stream(), False),
    ('key:"team a"', stream(key="team a"), True),
    ("phase:decode endpoint:chat", stream(), True),
    ("phase:prefill endpoint:chat", stream(), False),
    ("worker:7e", stream(workers=["7ea0", "7e9f"]), True),
    ("worker:7e", worker(), True),
    ("worker:9f", worker(), False),
    ("age>30", stream(), True),
    ("age>41", stream(), False),
    ("age>=41", stream(), True),
    ("age>500ms age<1m", stream(), True),
    ("age>1", recent(), True),  # how long it took
    ("age>3", recent(), False),
    ("out>1k", stream(output_tokens=1001), True),
    ("out>1k", stream(output_tokens=1000), False),
    ("ttft>0", stream(), False),  # not known
    ("!ttft>0", stream(), True),
    ("kv>95", worker(kv_blocks_used=96, kv_blocks_total=100), True),
    ("kv>95", worker(kv_blocks_used=96), False),
    ("status=503", recent(), True),
    ("status:503", recent(), True),
    ("failed", recent(), True),
    ("failed", recent(outcome="ok"), False),
    ("fallback model:cloud", recent(served_by="cloud"), True),
    ("fallback", stream(), False),
    ("stalled", stream(is_stalled=True), True),
    ("stalled", stream(), False),
    ('"stalled"', stream(client_request_id="un-stalled-1"), True),
    ("52a1", stream(), True),
    ("52a1", recent(), False),
    ("req-7", stream(client_request_id="REQ-77"), True),
    ("id:chatcmpl", stream(), True),
    ("id:52a1", stream(), False),
    ("state:quarantined", worker(state="quarantined"), True),
    ("quarantined", worker(state="quarantined"), True),
    ("wire:mux role:agg", worker(), True),
]


@each_case("case", HOLDS)
def test_a_filter_holds_for_the_rows_it_describes(case: tuple[str, Any, bool]) -> None:
    text, row, holds = case
    assert parse_filter(text).matches(row, NOW) is holds, text


@each_case(
    "case",
    [
        ("modle:demo", "modle:demo", "modle"),
        ("model:demo age>x", "age>x", "not a number"),
        ("age>30k", "age>30k", "duration"),
        ("out>30s", "out>30s", "count"),
        ("colour>3", "colour>3", "colour"),
        ("model:", "model:", "value"),
        ("!", "!", "`!`"),
        ('model:"demo', '"demo', "not closed"),
        ("a " * 33, "a", "33 terms"),
        ("a" * 1025, "a" * 32, "1025 characters"),
    ],
)
def test_what_is_wrong_is_named(case: tuple[str, str, str]) -> None:
    text, part, reason = case
    with pytest.raises(FilterError, match=reason) as raised:
        parse_filter(text)
    assert raised.value.part == part


@given(st.text(max_size=200))
def test_any_text_is_a_filter_or_a_typed_error(text: str) -> None:
    try:
        found = parse_filter(text)
    except FilterError:
        return
    for row in (stream(), recent(), worker()):
        assert found.matches(row, NOW) in (True, False)


_terms = st.one_of(
    st.builds("{}:{}".format, st.sampled_from(sorted(FIELDS)), st.from_regex(r"[a-z0-9*-]{1,8}", fullmatch=True)),
    st.builds(
        "{}{}{}".format,
        st.sampled_from(sorted(FIGURES)),
        st.sampled_from([">", "<", ">=", "<=", "="]),
        st.integers(-10, 10**6),
    ),
    st.sampled_from(sorted(MARKS)),
    st.from_regex(r"[a-z0-9-]{1,8}", fullmatch=True).filter(lambda text: text not in MARKS),
)


@given(st.lists(_terms, max_size=8), st.sampled_from([stream(), recent(), worker(), stream(is_stalled=True)]))
def test_all_terms_have_to_hold_and_each_can_be_turned_round(terms: list[str], row: Any) -> None:
    each = [parse_filter(term).matches(row, NOW) for term in terms]
    assert parse_filter(" ".join(terms)).matches(row, NOW) is all(each)
    assert [parse_filter("!" + term).matches(row, NOW) for term in terms] == [not one for one in each]


@given(st.text("ab", max_size=12), st.text("ab*", min_size=1, max_size=6))
def test_a_star_stands_for_anything(text: str, pattern: str) -> None:
    import re

    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None
    assert parse_filter(f"model:{pattern}").matches(stream(model=text), NOW) is expected

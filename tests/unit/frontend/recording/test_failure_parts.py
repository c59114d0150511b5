"""The parts behind the bundles of failed requests: templates, shapes, the scrubber, the ring."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.base.failures import (
    MAX_GROUPS,
    MAX_TEMPLATE_CHARACTERS,
    FailedRequest,
    FailureRing,
    message_template,
)
from dynamo.frontend.parts.recording.bundles import MAX_LINES, ContentScrubber, RequestLogLines
from dynamo.frontend.parts.recording.request_shape import shape_of
from dynamo.runtime.observe.log_text import one_line
from dynamo.runtime.observe.logging import log_span
from support.cases import each_case

# -- templates ----------------------------------------------------------------------------------------------------------


@each_case(
    "message,template",
    [
        ("worker 7e9f1 lost after 12 tokens", "worker # lost after # tokens"),
        ("Model `llama` is not ready", "Model `*` is not ready"),
        ("got 'abc', wanted \"x y\"", "got '*', wanted \"*\""),
        ("it isn't there and we don't know", "it isn't there and we don't know"),
        ("id chatcmpl-4f1d2c3b. Retry in 3.5 s.", "id #. Retry in # s."),
        ("cut off: 'once upon", "cut off: '*'"),
        ("two\nlines\x1b[31m", "two lines\\x1b[#"),
        ("deadbeefcafe", "#"),
        ("", ""),
    ],
)
def test_a_template_replaces_what_differs(message: str, template: str) -> None:
    assert message_template(message) == template


@given(st.integers(0, 10**12), st.uuids(), st.text(st.characters(exclude_characters="'\n"), max_size=50))
def test_messages_that_differ_in_numbers_ids_and_quotes_have_one_template(number: int, id: Any, quoted: str) -> None:
    assert message_template(f"worker {id} said '{quoted}' {number} times") == "worker # said '*' # times"


@given(st.text(max_size=4000))
def test_a_template_is_one_bounded_line(message: str) -> None:
    found = message_template(message)
    assert len(found) <= MAX_TEMPLATE_CHARACTERS
    assert one_line(found, len(found)) == found


# -- shapes -------------------------------------------------------------------------------------------------------------

SECRET = "the quick brown fox"


def test_parameters_stay_and_content_is_described() -> None:
    body = {
        "model": "m",
        "temperature": 0.5,
        "stream": True,
        "messages": [
            {"role": "system", "content": SECRET},
            {"role": "user", "content": [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": SECRET}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": SECRET}}]},
        ],
        "tools": [{"type": "function", "function": {"name": SECRET}}],
        "user": SECRET,
        "nvext": {"priority": 3, "cache_salt": SECRET},
        "unheard_of": {SECRET: SECRET},
    }
    shape = shape_of(body)
    assert shape is not None
    assert "fox" not in json.dumps(shape)
    assert (shape["model"], shape["temperature"], shape["stream"]) == ("m", 0.5, True)
    system, user, _ = shape["messages"]
    assert system["role"] == "system"
    assert (system["content"]["omitted"], system["content"]["characters"]) == ("text", len(SECRET))
    assert [part["type"] for part in user["content"]] == ["text", "image_url"]
    assert user["content"][0]["text"] == system["content"]  # equal texts are seen to be equal
    assert shape["nvext"]["priority"] == 3


def test_token_ids_are_content() -> None:
    shape = shape_of({"model": "m", "prompt": [101, 102, 103]})
    assert shape is not None
    assert (shape["prompt"]["omitted"], shape["prompt"]["count"]) == ("ids", 3)
    assert "102" not in json.dumps(shape["prompt"] | {"mark": ""})


@given(
    st.recursive(
        st.just("marker of content"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=10,
    ),
    st.sampled_from(["messages", "input", "prompt", "tools", "nvext", "metadata", "zzz"]),
)
def test_no_text_of_an_unknown_member_is_kept(value: Any, name: str) -> None:
    assert "marker" not in json.dumps(shape_of({name: value}))


# -- the scrubber -------------------------------------------------------------------------------------------------------

PROMPT = "Dear doctor, since Tuesday my left knee hurts whenever I climb the stairs."


@each_case(
    "text,cleaned",
    [
        (f"engine failed on {PROMPT!r}", f"engine failed on '[{len(PROMPT)} characters of the request]'"),
        (f"cut: {PROMPT[10:40]}...", "cut: [30 characters of the request]..."),
        ("nothing of it", "nothing of it"),
        ("the word knee alone is too short to find", "the word knee alone is too short to find"),
        ("user said Ada!", "user said Ada!"),
        ("user said Grace!", "user said [text of the request]!"),
        ("graceful Graceland", "graceful Graceland"),
    ],
)
def test_what_a_text_quotes_of_the_request_is_taken_out(text: str, cleaned: str) -> None:
    assert ContentScrubber([PROMPT, "Ada", "Grace"]).clean(text) == cleaned


@given(st.text(max_size=60), st.text(max_size=60), st.text(min_size=15, max_size=60), st.data())
def test_no_run_of_fifteen_characters_survives(before: str, behind: str, content: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content) - 15))
    run = content[start : start + 15]
    cleaned = ContentScrubber([content]).clean(before + run + behind)
    assert run not in cleaned or run in "[999 characters of the request]"


# -- the ring -----------------------------------------------------------------------------------------------------------


class Rig:
    """A ring under a clock of its own."""

    def __init__(self, bundles: int = 100, size: int = 100_000) -> None:
        self.seconds = 1_000_000.0
        self.made = 0
        self.ring = FailureRing(bundles, size, wall_clock=lambda: self.seconds, process=lambda: {"pid": 1})

    def fail(self, id: str, message: str = "it broke", *, pad: int = 0, **more: Any) -> None:
        values: dict[str, Any] = {"status": 500, "error_type": "internal", "model": "m", "worker": "7e"} | more
        failure = FailedRequest(id=id, request_id=id, at_ms=self.ring.now_ms(), message=message, **values)

        def make() -> dict[str, Any]:
            self.made += 1
            return {"id": id, "pad": "x" * pad}

        self.ring.add(failure, make)


def test_failures_are_grouped_by_kind() -> None:
    rig = Rig()
    for number in range(3):
        rig.fail(f"a{number}", f"worker {number} died")
        rig.seconds += 60
    rig.fail("b", "another")
    latest, first = rig.ring.grouped()
    assert (latest.template, latest.count, latest.example_id) == ("another", 1, "b")
    assert (first.template, first.count, first.example_id) == ("worker # died", 3, "a2")
    assert first.rate_per_minute == pytest.approx(1.0)
    assert (first.first_ms, first.last_ms) == (1_000_000_000, 1_000_120_000)
    assert [failure.id for failure in rig.ring.recent()] == ["b", "a2", "a1", "a0"]
    assert [failure.id for failure in rig.ring.recent(1)] == ["b"]


def test_a_rate_is_of_the_last_five_minutes() -> None:
    rig = Rig()
    for number in range(10):
        rig.fail(str(number))
    assert rig.ring.grouped()[0].rate_per_minute == 10
    rig.seconds += 100
    assert rig.ring.grouped()[0].rate_per_minute == pytest.approx(6)
    rig.seconds += 1000
    assert rig.ring.grouped()[0].rate_per_minute == 0
    assert rig.ring.grouped()[0].count == 10


def test_a_storm_of_one_kind_leaves_the_only_example_of_another() -> None:
    rig = Rig(bundles=10)
    rig.fail("rare", "something odd")
    for number in range(200):
        rig.fail(f"s{number}", "the storm", status=400)
        rig.seconds += 1
    assert rig.ring.bundle("rare") is not None
    assert len(rig.ring.recent()) == 10


def test_bundles_are_bounded_in_bytes() -> None:
    rig = Rig(bundles=100, size=10_000)
    for number in range(50):
        rig.fail(str(number), pad=1000)
        rig.seconds += 1
    assert rig.ring.kept_bytes <= 10_000
    assert rig.ring.bundle("49") is not None
    assert rig.ring.bundle("0") is None
    rig.fail("huge", "another", pad=20_000)
    assert rig.ring.bundle("huge") is None
    assert rig.ring.bundle("49") is not None


def test_a_burst_is_counted_but_few_bundles_are_made() -> None:
    rig = Rig()
    for number in range(1000):
        rig.fail(str(number))
    assert rig.made == 20
    assert rig.ring.total == rig.ring.grouped()[0].count == 1000


def test_a_client_that_makes_up_messages_pushes_out_its_own() -> None:
    rig = Rig()
    rig.fail("rare", "something odd", status=503)
    for number in range(2 * MAX_GROUPS):
        name = "".join(chr(ord("a") + int(digit)) for digit in f"{number:04}")
        rig.fail(str(number), f"no {name} here", status=400)
        rig.seconds += 1
    assert len(rig.ring.grouped(limit=10_000)) == MAX_GROUPS
    assert rig.ring.bundle("rare") is not None


def test_what_is_the_same_for_all_is_added_when_a_bundle_is_read() -> None:
    rig = Rig()
    rig.fail("a")
    assert rig.ring.bundle("a") == {"schema": "dynamo.failure.v1", "id": "a", "pad": "", "process": {"pid": 1}}
    assert rig.ring.bundle("b") is None


def test_a_ring_of_no_bundles_only_counts() -> None:
    rig = Rig(bundles=0)
    rig.fail("a")
    assert (rig.made, rig.ring.recent(), rig.ring.grouped()[0].example_id) == (0, [], None)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 500), st.booleans()), max_size=60
    ),
    st.integers(1, 8),
    st.integers(200, 2000),
)  # fmt: skip
def test_the_ring_keeps_its_books(steps: list[tuple[int, int, bool]], bundles: int, size: int) -> None:
    rig = Rig(bundles, size)
    for number, (kind, pad, waits) in enumerate(steps):
        rig.fail(str(number), "abcdef"[kind] * 3, pad=pad)
        rig.seconds += waits
        kept = rig.ring.recent(limit=1000)
        assert len(kept) <= bundles
        assert rig.ring.kept_bytes <= size
        assert all(rig.ring.bundle(failure.id) is not None for failure in kept)
        ids = {failure.id for failure in kept}
        assert all(group.example_id is None or group.example_id in ids for group in rig.ring.grouped())
    assert sum(group.count for group in rig.ring.grouped()) == len(steps) == rig.ring.total


# -- the log ------------------------------------------------------------------------------------------------------------


def test_the_last_warnings_of_a_request_are_kept_for_its_bundle() -> None:
    lines, logger = RequestLogLines(), logging.getLogger("dynamo.test_recording")
    lines.attach()
    try:
        with log_span("s", request_id="r-1"):
            logger.info("not this")
            for number in range(MAX_LINES + 5):
                logger.warning("number %d", number)
        logger.warning("of no request")
    finally:
        lines.detach()
    with log_span("s", request_id="r-1"):
        logger.warning("after the end")
    found = lines.take("r-1")
    assert len(found) == MAX_LINES
    assert "number 24" in found[-1]
    assert "request_id=r-1" in found[-1]
    assert lines.take("r-1") == []

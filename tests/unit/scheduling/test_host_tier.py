"""The tier of a simulated cache in host memory: what it brings back, when, and what it tells routers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.mocker.timing import FixedTiming
from dynamo.scheduling import (
    DEVICE_TIER,
    HOST_TIER,
    BlockRun,
    HostTierOptions,
    ScheduledRequest,
    SchedulerCore,
    SchedulerOptions,
    make_core,
)
from support.properties import examples
from support.virtual_engine import Timeline, play

fresh = itertools.count()


def core(
    *, gpu: int = 8, host: int = 100, to_host: float = 0.1, to_device: float = 1.0, **options: Any
) -> SchedulerCore:
    tier = HostTierOptions(num_host_blocks=host, to_host_block_ms=to_host, to_device_block_ms=to_device)
    return make_core(
        SchedulerOptions(**{"num_gpu_blocks": gpu, "block_size": 4, "host": tier, **options}), FixedTiming(10.0, 1.0)
    )


def request(tokens: int, output: int = 1, *, start: int = 0) -> ScheduledRequest:
    return ScheduledRequest.of_tokens(
        f"r{next(fresh)}", range(start, start + tokens), output, 4, itertools.count(10_000)
    )


def changes(line: Timeline) -> list[tuple[str, str, int]]:
    return [
        ("stored" if isinstance(event, BlockRun) else "removed", event.tier, len(event.identities))
        for event in line.events
    ]


def test_a_prompt_that_left_the_device_comes_back_from_the_host() -> None:
    first, other, again = request(25), request(25, start=1000), request(25)
    line = play(core(), [(0, first), (20, other), (100, again)])
    assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 0, 24)
    # Of its six blocks the first one still lies on the device: 5 ms of copies, then a pass for the last token.
    assert line.ttft(again) == pytest.approx(15.0)


def test_blocks_are_announced_when_their_copies_have_ended() -> None:
    line = play(core(), [(0, request(25)), (50, request(2, start=500))])
    assert changes(line) == [("stored", DEVICE_TIER, 6), ("stored", HOST_TIER, 6)]
    slow = play(core(to_host=4.0), [(0, request(25)), (5, request(2, 2, start=500)), (100, request(2, start=600))])
    # Copies begin at 10, when the pass ends, and take 4 ms each; those that have ended are shown with the next pass.
    assert changes(slow) == [
        ("stored", DEVICE_TIER, 6),
        ("stored", HOST_TIER, 2),
        ("stored", HOST_TIER, 4),
    ]


def test_a_block_of_the_host_follows_the_one_before_it() -> None:
    line = play(core(to_host=4.0), [(0, request(25)), (5, request(2, 2, start=500)), (100, request(2, start=600))])
    (device, first, second) = line.events
    assert isinstance(device, BlockRun)
    assert isinstance(first, BlockRun)
    assert isinstance(second, BlockRun)
    assert [*first.identities, *second.identities] == device.identities
    assert (first.parent, second.parent) == (None, first.identities[-1])


def test_a_full_host_gives_up_suffixes_before_their_prefixes() -> None:
    one = core(host=8)
    line = play(one, [(0, request(25)), (50, request(25, start=1000)), (100, request(2, start=500))])
    removed = [event for event in line.events if event.tier == HOST_TIER and not isinstance(event, BlockRun)]
    stored = [event for event in line.events if isinstance(event, BlockRun) and event.tier == HOST_TIER]
    assert [block for event in removed for block in event.identities] == stored[0].identities[:1:-1]
    assert one.host is not None
    assert one.host.held == 8


def test_what_is_on_the_device_is_not_fetched() -> None:
    first, again = request(25), request(25)
    line = play(core(gpu=50), [(0, first), (100, again)])
    assert again.cached_tokens == 24
    assert line.ttft(again) == pytest.approx(10.0)


def test_others_are_served_while_a_prompt_is_on_its_way() -> None:
    first, other, again, small = request(25), request(25, start=1000), request(25), request(3, start=2000)
    line = play(core(to_device=20.0), [(0, first), (20, other), (100, again), (100, small)])
    assert line.ttft(small) == pytest.approx(10.0)
    assert line.ttft(again) >= 100.0


def test_a_request_that_is_cancelled_on_its_way_gives_its_blocks_back() -> None:
    one = core(to_device=20.0)
    play(one, [(0, request(25)), (20, request(25, start=1000))])
    again = request(25)
    one.submit(again, 100.0)
    plan = one.begin_pass(100.0)
    assert plan is not None
    assert plan.duration_ms > 0
    one.end_pass()
    assert one.pool.used > 0
    one.cancel(again)
    assert one.pool.used == 0
    assert not one.has_work


def test_a_speedup_of_zero_copies_in_no_time() -> None:
    first, other, again = request(25), request(25, start=1000), request(25)
    line = play(core(speedup_ratio=0.0), [(0, first), (20, other), (100, again)])
    assert again.cached_tokens == 24
    assert line.ttft(again) == 0.0


@pytest.mark.parametrize("options", [{"backend": "sglang"}, {"backend": "trtllm"}, {"enable_prefix_caching": False}])
def test_only_vllm_with_prefix_caching_has_a_host_tier(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="native_host_offload"):
        core(**options)


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(1, 8), st.integers(0, 2)), max_size=20),
    st.integers(1, 12),
    st.sampled_from([0.1, 3.0]),
    st.sampled_from([0.1, 30.0]),
    st.integers(1, 4),
)
def test_every_request_ends_and_both_tiers_hold_what_their_events_say(
    load: list[tuple[int, int, int, int]], host: int, to_host: float, to_device: float, max_num_seqs: int
) -> None:
    one = core(gpu=10, host=host, to_host=to_host, to_device=to_device, max_num_seqs=max_num_seqs)
    requests = [(at, request(tokens, output, start=1000 * kind)) for at, tokens, output, kind in load]
    line = play(one, requests)
    assert {name for name, _ in ((each.request_id, 0) for _, each in requests)} == set(line.finished)
    assert one.pool.used == 0
    held: dict[str, set[int]] = {DEVICE_TIER: set(), HOST_TIER: set()}
    for event in line.events:
        tier = held[event.tier]
        if isinstance(event, BlockRun):
            assert tier.isdisjoint(event.identities)
            assert event.parent is None or event.tier == HOST_TIER or event.parent in tier
            tier.update(event.identities)
        else:
            assert tier.issuperset(event.identities)
            tier.difference_update(event.identities)
    assert one.host is not None
    assert len(held[HOST_TIER]) == one.host.held <= host
    assert len(held[DEVICE_TIER]) == one.pool.cached

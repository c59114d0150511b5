"""The parts of a worker's listener that share and bound: queue, half-sent bodies, expansion, log lines, call-home addresses."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import msgspec
import pytest

from dynamo.errors import InvalidArgument
from dynamo.runtime.base.limits import PendingBytes
from dynamo.runtime.calls.request_plane.core import FairQueue
from dynamo.runtime.calls.request_plane.expansion import exceeds_when_decoded
from dynamo.runtime.calls.request_plane.native.call_home import CallHomePolicy, is_own_address
from dynamo.runtime.observe.log_rate import LogRate
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

MIB = 1024 * 1024


# -- the queue -------------------------------------------------------------------------------------------------------------


def test_lines_take_turns_and_each_keeps_its_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item[0], item)
    assert [queue.pop() for _ in range(len(queue))] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(KeyError):
        queue.pop()


def test_an_item_that_leaves_keeps_the_turns_of_the_others() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "b1", "b2", "c1"):
        queue.add(item[0], item)
    assert (queue.remove("b", "b1"), queue.remove("b", "b1"), queue.remove("d", "d1")) == (True, False, False)
    assert (queue.first_of_each_line(), list(queue), len(queue)) == (["a1", "b2", "c1"], ["a1", "b2", "c1"], 3)
    assert [queue.pop() for _ in range(3)] == ["a1", "b2", "c1"]


def test_room_is_made_for_a_short_line_by_the_newest_of_the_longest_one() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.add("a", f"a{number}")
    assert queue.displace_for("a") is None
    assert queue.displace_for("b") == "a3"
    queue.add("b", "b0")
    assert queue.displace_for("b") == "a2"
    queue.add("b", "b1")
    assert queue.displace_for("b") is None  # two and two
    assert queue.displace_for("c") in ("a1", "b1")


def test_no_line_can_starve_another_whatever_comes() -> None:
    chance = random.Random(5)
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, list[int]] = {name: [] for name in "abcde"}
    for number in range(5000):
        owner = chance.choice("aaaaaaaabcde")
        if len(queue) >= 50:
            displaced = queue.displace_for(owner)
            if displaced is None:
                assert (len(waiting[owner]) + 1) * (sum(map(bool, waiting.values())) + (not waiting[owner])) > 50
                continue
            longest = max(map(len, waiting.values()))
            assert len(waiting[displaced[0]]) == longest
            assert waiting[displaced[0]].pop() == displaced[1]
        queue.add(owner, (owner, number))
        waiting[owner].append(number)
        if chance.random() < 0.3:
            name, taken = queue.pop()
            assert waiting[name].pop(0) == taken
        assert len(queue) == sum(map(len, waiting.values())) <= 50


# -- half-sent bodies ------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, pending: PendingBytes) -> None:
        self.pending, self.bodies = pending, [0]

    def take(self, count: int) -> bool:
        taken = self.pending.take(self, count)
        if taken:
            self.bodies.append(count)
        return taken

    def shed_body(self) -> None:
        self.pending.take(self, -self.bodies.pop())


def test_a_connection_alone_has_all_the_room_and_one_with_less_gets_its_share() -> None:
    pending = PendingBytes(100, 100)
    first, second, third = (Holder(pending) for _ in range(3))
    assert [first.take(50), first.take(50), first.take(1)] == [True, True, False]
    assert second.take(40)
    assert (pending.used, first.bodies) == (90, [0, 50])
    assert not second.take(30)  # it would hold more than its share
    assert third.take(30)
    assert (pending.used, first.bodies, second.bodies) == (70, [0], [0, 40])


# -- expansion -------------------------------------------------------------------------------------------------------------


def array_of(member: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + member * count


@each_case("member", [b"\x90", b"\x80", b"\x81\xa0\xc0", b"\xa2ab", b"\xdc\x00\x00", b"\x91\x90"])
def test_arrays_of_small_values_are_found_out(member: bytes) -> None:
    assert exceeds_when_decoded(array_of(member, 4 * MIB), 200 * MIB)
    assert not exceeds_when_decoded(array_of(member, 100_000), 200 * MIB)


@each_case(
    "body",
    [
        {"token_ids": [n % 150_000 for n in range(1_000_000)]},
        {"token_ids": [1] * 1000, "image": random.Random(3).randbytes(30 * MIB)},
        {"prompt": "a text with {braces}, [brackets] and more " * 500_000},
        {"logit_bias": {str(n): -1.5 for n in range(150_000)}},
    ],
    ids=["a million tokens", "an image", "a long text", "a whole vocabulary"],
)
def test_honest_requests_pass(body: Any) -> None:
    assert not exceeds_when_decoded(msgspec.msgpack.encode(body), 256 * MIB)


def test_json_is_judged_likewise() -> None:
    assert exceeds_when_decoded(b"[" + b"[]," * (4 * MIB) + b"[]]", 256 * MIB, "json")
    tokens = msgspec.json.encode({"token_ids": [n % 150_000 for n in range(500_000)]})
    assert not exceeds_when_decoded(tokens, 256 * MIB, "json")


def test_rubbish_of_any_kind_is_judged_without_an_error() -> None:
    chance = random.Random(11)
    for _ in range(300):
        exceeds_when_decoded(chance.randbytes(chance.randrange(2000)), 100)
        exceeds_when_decoded(bytes([chance.choice(b"\xd9\xda\xdb\xc4\xc5\xc6\xc7\xc8\xc9")]) * 50, 100)
    assert not exceeds_when_decoded(b"", 0)


# -- log lines -------------------------------------------------------------------------------------------------------------


async def test_one_line_for_each_kind_and_then_how_many_more(caplog: pytest.LogCaptureFixture) -> None:
    rate = LogRate(logging.getLogger("dynamo.test"), 0.05)
    for number in range(1000):
        rate.warn("bad frames", "a bad frame: %d", number)
    rate.warn("late frames", "a late frame")
    assert [record.getMessage() for record in caplog.records] == ["a bad frame: 0", "a late frame"]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(caplog.records) < 3:
            await asyncio.sleep(0.01)
    assert caplog.records[2].getMessage() == "999 more suppressed within 0.05 s: bad frames"
    rate.warn("bad frames", "a bad frame: again")
    assert caplog.records[-1].getMessage() == "a bad frame: again"


# -- call-home addresses ---------------------------------------------------------------------------------------------------

OWN = frozenset({"127.0.0.1", "10.0.0.5"})


@each_case(
    ("host", "caller", "allowed", "permitted"),
    [
        ("10.0.0.9", "10.0.0.9", (), True),
        ("10.0.0.9", "::ffff:10.0.0.9", (), True),
        ("10.0.0.8", "10.0.0.9", (), False),
        ("127.0.0.1", "10.0.0.9", (), False),  # the worker's own services
        ("10.0.0.5", "10.0.0.9", (), False),
        ("10.0.0.5", "127.0.0.1", (), True),  # both are this machine
        ("169.254.169.254", "127.0.0.1", (), False),
        ("::1", "fd00::1", (), False),
        ("fd00::1", "fd00::1", (), True),
        ("frontend.example", "10.0.0.9", (), False),  # looking it up would already be a connection elsewhere
        ("frontend.example", "10.0.0.9", ("Frontend.Example",), True),
        ("10.1.2.3", "10.0.0.9", ("10.1.0.0/16",), True),
        ("10.2.2.3", "10.0.0.9", ("10.1.0.0/16",), False),
        ("10.2.2.3", "10.0.0.9", ("any",), True),
        ("10.2.2.3", None, (), True),  # over NATS
        ("10.2.2.3", None, ("10.1.0.0/16",), False),
        ("10.1.2.3", None, ("10.1.0.0/16",), True),
        ("10.1.2.3", "", (), False),
    ],
)
def test_where_answers_may_be_brought(host: str, caller: str | None, allowed: tuple[str, ...], permitted: bool) -> None:
    policy = CallHomePolicy(allowed, is_own=OWN.__contains__)
    assert [policy.permits(host, caller) for _ in range(2)] == [permitted, permitted]


def test_a_network_that_is_none_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"DYN_TCP_CALL_HOME_NETWORKS: '10\.0\.0\.0/99'"):
        CallHomePolicy(("10.0.0.0/99",))


def test_own_addresses_can_be_bound_and_wildcards_are_none() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("0.0.0.0")

"""`SelectionService`: its calls, answers and errors, by the table of the native one."""

from __future__ import annotations

import asyncio
import gc
import random
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

import dynamo._core
from dynamo.errors import SelectionServiceError
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.llm import SelectionCacheConfig, SelectionService
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

SIZE = 16
PROMPT = list(range(69))  # four blocks, and five tokens of a fifth
SILENT = "inproc://silent"  # an address at which nothing is ever published
NAMED = {"model_name": "default", "routing_group": "default"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """The PUB socket of an engine."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._sequence = 0

    def publish(self, *events: Any) -> None:
        payload = msgspec.msgpack.encode([0.0, list(events)])
        self._socket.send_multipart([b"", self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.fixture
async def service() -> Any:
    made = SelectionService(session_affinity_ttl_secs=60)
    yield made
    await made.shutdown_async()


def worker(worker_id: int, **further: Any) -> dict[str, Any]:
    ranks = range(further.get("data_parallel_start_rank", 0), further.get("data_parallel_start_rank", 0) + further.get("data_parallel_size", 1))  # fmt: skip
    return {
        "worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": SIZE,
        "kv_events_endpoints": dict.fromkeys(ranks, SILENT), **further,
    }  # fmt: skip


def stored(tokens: list[int], medium: str = "GPU", parent: int | None = None, first: int = 1) -> list[Any]:
    names = [first + number for number in range(len(tokens) // SIZE)]
    return ["BlockStored", names, parent, tokens, SIZE, None, medium]


async def until(condition: Callable[[], Awaitable[bool]], again: Callable[[], None] = lambda: None) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            again()
            await asyncio.sleep(0.005)


async def refused(kind: str, status: int, message: str, call: Awaitable[Any]) -> None:
    with pytest.raises(SelectionServiceError) as caught:
        await call
    assert (caught.value.kind, caught.value.status_code, str(caught.value)) == (kind, status, message)


def test_the_names_are_those_of_the_native_module() -> None:
    assert "SelectionService" in dynamo._core.__all__
    assert dynamo._core.SelectionServiceError is SelectionServiceError


# -- workers ------------------------------------------------------------------------------------------------------------


async def test_a_worker_is_schedulable_once_nothing_is_missing(service: SelectionService) -> None:
    bare = await service.upsert_worker({"worker_id": 7, "data_parallel_size": 2, "unknown": object})
    assert bare["lifecycle"] == "incomplete"
    assert bare["not_schedulable_reasons"] == [
        "endpoint is required", "block_size must be greater than 0", "kv_events endpoint is required for dp_rank 0",
        "kv_events endpoint is required for dp_rank 1",
    ]  # fmt: skip
    assert service.ready() == {"ready": False, "schedulable_workers": 0, "workers": 1}
    patch = {key: value for key, value in worker(7, data_parallel_size=2).items() if key != "worker_id"}
    whole = await service.patch_worker(7, patch)
    assert (whole["lifecycle"], whole["not_schedulable_reasons"]) == ("schedulable", [])
    assert whole["kv_events_endpoints"] == {0: SILENT, 1: SILENT}
    assert service.ready() == {"ready": True, "schedulable_workers": 1, "workers": 1}
    assert await service.patch_worker(7, {"endpoint": None}) == service.list_workers()[0]
    assert service.ready()["ready"] is False


async def test_an_upsert_replaces_the_whole_worker(service: SelectionService) -> None:
    await service.upsert_worker(worker(1, taints=["a"], total_kv_blocks=9))
    record = await service.upsert_worker(worker(1, model_name="m", routing_group="g"))
    assert (record["taints"], record["total_kv_blocks"]) == ([], None)
    assert service.list_workers() == service.list_workers(model_name="m", routing_group="g") == [record]
    assert service.list_workers(model_name="default") == service.list_workers(routing_group="default") == []
    await refused("not_ready", 503, "no schedulable workers for model=default routing_group=default", service.select({"token_ids": PROMPT}))  # fmt: skip
    assert (await service.select({"token_ids": PROMPT, "model_name": "m", "routing_group": "g"}))["worker_id"] == 1


@each_case(
    ("given", "message"),
    [
        ({}, "missing field `worker_id`"),
        ([], "expected a dict, got list"),
        ({"worker_id": "1"}, r"Expected `int`, got `str` - at `\$\.worker_id`"),
        ({"worker_id": -1}, ">= 0"),
        ({"worker_id": 1, "kv_events_endpoints": {"0": SILENT}}, "Expected `int`, got `str` - at `key`"),
        ({"worker_id": 1, "data_parallel_size": 0}, "data_parallel_size"),
        ({"worker_id": 1, "kv_transfer_enforcement": "maybe"}, "kv_transfer_enforcement"),
        (worker(1, kv_events_endpoints={0: "nowhere"}), "worker 1: .*'nowhere' cannot be subscribed to"),
        (
            worker(1, block_size=32),
            "worker 1: the other workers of model=default routing_group=default have block_size 16 and is_eagle False",
        ),
        (worker(1, is_eagle=True), "have block_size 16"),
    ],
)
def test_a_worker_that_cannot_be_is_refused_and_changes_nothing(given: Any, message: str) -> None:
    async def refuse() -> None:
        service = SelectionService()
        await service.upsert_worker(worker(2))
        before = service.list_workers()
        with pytest.raises(ValueError, match=message):
            await service.upsert_worker(given)
        assert service.list_workers() == before
        await service.shutdown_async()

    asyncio.run(refuse())


async def test_a_lone_worker_may_come_back_with_other_blocks(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    await service.select_and_reserve({"token_ids": PROMPT, "selection_id": "r"})
    await service.upsert_worker(worker(1, block_size=32))
    assert (await service.select({"token_ids": PROMPT}))["block_size"] == 32
    await refused("not_found", 404, "reservation r not found", service.prefill_complete("r"))


async def test_a_worker_that_never_came_is_not_found(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    for call in (
        service.delete_worker(5),
        service.patch_worker(5, {}),
        service.select({"token_ids": PROMPT, "pinned_worker": {"worker_id": 5}}),
        service.create_reservation({"selection_id": "r", "worker_id": 5, "token_ids": PROMPT}),
    ):
        await refused("not_found", 404, "worker 5 not found", call)
    with pytest.raises(ValueError, match="the worker_id of worker 1 cannot change"):
        await service.patch_worker(1, {"worker_id": 2})
    await service.delete_worker(1)
    assert service.list_workers() == service.loads() == []


# -- selections ---------------------------------------------------------------------------------------------------------


async def test_a_selection_names_the_worker_and_books_nothing(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    assert await service.select({"token_ids": PROMPT, "unknown": 1}) == {
        **NAMED, "worker_id": 1, "dp_rank": 0, "endpoint": "http://w1", "block_size": SIZE,
        "overlap": {"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0},
        "effective_prefill_tokens": 69, "potential_decode_blocks": 5,
    }  # fmt: skip
    (pool,) = service.loads()
    assert pool == {
        **NAMED, "pending_count": 0, "pending_isl_tokens": 0,
        "loads": [{"worker_id": 1, "dp_rank": 0, "potential_prefill_tokens": 0, "potential_decode_blocks": 0, "active_requests": 0}],
    }  # fmt: skip


async def test_a_reservation_counts_until_it_is_freed(service: SelectionService) -> None:
    def load() -> tuple[int, int, int]:
        ((found,),) = [pool["loads"] for pool in service.loads()]
        return found["potential_prefill_tokens"], found["potential_decode_blocks"], found["active_requests"]

    await service.upsert_worker(worker(1))
    made = await service.select_and_reserve({"token_ids": PROMPT})
    assert str(uuid.UUID(made["selection_id"])) == made["selection_id"]
    names = sequence_hashes(block_hashes(PROMPT, SIZE))
    assert [each % 2**64 for each in made["sequence_hashes"]] == names
    assert all(-(2**63) <= each < 2**63 for each in made["sequence_hashes"])
    assert (made["isl_tokens"], made["track_prefill_tokens"]) == (69, True)
    assert load() == (69, 4, 1)
    assert (await service.potential_loads({"token_ids": PROMPT}))["loads"][0]["potential_prefill_tokens"] == 138
    await service.prefill_complete(made["selection_id"])
    assert load() == (0, 4, 1)
    service.add_output_block(made["selection_id"])
    assert load() == (0, 5, 1)
    service.add_output_block(made["selection_id"], decay_fraction=0.5)
    assert load() == (0, 3, 1)  # six blocks of this request alone, half of each
    await service.free_reservation(made["selection_id"])
    assert load() == (0, 0, 0)
    await refused("not_found", 404, f"reservation {made['selection_id']} not found", service.free_reservation(made["selection_id"]))  # fmt: skip


async def test_a_prompt_may_be_given_by_its_hashes(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    own = block_hashes(PROMPT, SIZE)
    names = [each - 2**64 if each >= 2**63 else each for each in range(2**63 - 2, 2**63 + 2)]
    made = await service.select_and_reserve({"block_hashes": own, "sequence_hashes": names, "isl_tokens": 69, "track_prefill_tokens": False})  # fmt: skip
    assert (made["sequence_hashes"], made["isl_tokens"], made["track_prefill_tokens"]) == (names, 69, False)
    assert service.loads()[0]["loads"][0]["potential_prefill_tokens"] == 0
    assert (await service.select({"block_hashes": own}))["effective_prefill_tokens"] == 64


async def test_what_is_allowed_and_what_is_pinned_hold(service: SelectionService) -> None:
    for worker_id in (1, 2, 3):
        await service.upsert_worker(worker(worker_id, data_parallel_size=2))
    for _ in range(8):
        assert (await service.select({"token_ids": PROMPT, "allowed_worker_ids": [2]}))["worker_id"] == 2
        pinned = await service.select({"token_ids": PROMPT, "pinned_worker": {"worker_id": 3, "dp_rank": 1}})
        assert (pinned["worker_id"], pinned["dp_rank"]) == (3, 1)
        assert pinned["overlap"]["dp"] == {"0": 0, "1": 0}
    for wrong in (
        {"allowed_worker_ids": [9]},
        {"pinned_worker": {"worker_id": 3, "dp_rank": 7}},
        {"pinned_worker": {"worker_id": 3}, "allowed_worker_ids": [1]},
    ):
        await refused("not_ready", 503, "no schedulable workers are available", service.select({"token_ids": PROMPT, **wrong}))  # fmt: skip


@each_case(
    ("request_", "message"),
    [
        ({}, "^block_hashes is required without token_ids$"),
        ({"sequence_hashes": [1], "isl_tokens": 16}, "^block_hashes is required without token_ids$"),
        ({"block_hashes": [1, 2], "isl_tokens": 31}, "isl_tokens must be at least 32 for 2 blocks, got 31"),
        ({"block_hashes": [1], "sequence_hashes": [1, 2]}, "sequence_hashes must name each of 1 blocks, got 2"),
        ({"block_hashes": [2**64]}, "does not fit into 64 bits"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(request_: dict[str, Any], message: str) -> None:
    async def refuse() -> None:
        service = SelectionService()
        await service.upsert_worker(worker(1))
        for call in (service.select, service.select_and_reserve, service.potential_loads, service.overlap_scores):
            with pytest.raises(ValueError, match=message):
                await call(request_)
        assert service.loads()[0]["loads"][0]["active_requests"] == 0
        await service.shutdown_async()

    asyncio.run(refuse())


# -- reservations of selections -----------------------------------------------------------------------------------------


async def test_a_selection_is_reserved_once(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    missing = (
        "no pending selection s for model=default routing_group=default (expired, already used, or never selected)"
    )
    reserve = {"selection_id": "s", **NAMED}
    await refused("not_found", 404, missing, service.create_reservation(reserve))
    await service.select({"token_ids": PROMPT, "selection_id": "s"})
    assert await service.create_reservation(reserve) == {
        "selection_id": "s", **NAMED, "worker_id": 1, "dp_rank": 0, "endpoint": "http://w1",
    }  # fmt: skip
    taken = "selection s is already reserved or being reserved"
    await refused("conflict", 409, taken, service.create_reservation(reserve))
    await refused("conflict", 409, taken, service.select_and_reserve({"token_ids": PROMPT, "selection_id": "s"}))
    await service.free_reservation("s")
    await refused("not_found", 404, missing, service.create_reservation(reserve))
    with pytest.raises(ValueError, match="missing field `selection_id`"):
        await service.create_reservation({})


async def test_a_reservation_may_name_its_worker(service: SelectionService) -> None:
    await service.upsert_worker(worker(1, data_parallel_size=2))
    await service.select({"token_ids": PROMPT, "selection_id": "s"})
    given = {"selection_id": "s", "worker_id": 1, "dp_rank": 1, "sequence_hashes": [5, -6], "isl_tokens": 40}
    with pytest.raises(ValueError, match="effective_prefill_tokens must not exceed isl_tokens 40, got 41"):
        await service.create_reservation({**given, "effective_prefill_tokens": 41})
    await service.create_reservation({**given, "effective_prefill_tokens": 8})
    second = service.loads()[0]["loads"][1]
    assert (second["dp_rank"], second["potential_prefill_tokens"], second["potential_decode_blocks"]) == (1, 8, 2)
    await service.free_reservation("s")
    await refused("not_found", 404, "no pending selection s for model=default routing_group=default (expired, already used, or never selected)", service.create_reservation({"selection_id": "s"}))  # fmt: skip
    await refused("not_found", 404, "worker 1 not found", service.create_reservation({**given, "dp_rank": 2}))


@each_case(
    ("bounds", "left"),
    [
        ({"ttl_secs": 5.0}, ["d"]),  # the others were selected too long ago
        ({"max_entries": 2}, ["c", "d"]),
        ({"max_bytes": 1500}, ["c", "d"]),  # each takes about 700
        ({"max_bytes": 10}, []),
    ],
)
def test_selections_wait_within_bounds(bounds: dict[str, Any], left: list[str]) -> None:
    async def fill() -> None:
        clock = Clock()
        service = SelectionService(selection_cache=SelectionCacheConfig(**bounds), clock=clock)
        await service.upsert_worker(worker(1))
        for name in "abcd":
            await service.select({"token_ids": PROMPT, "selection_id": name})
            clock.now += 5.0 if name == "c" else 0.0
        kept = []
        for name in "abcd":
            try:
                await service.create_reservation({"selection_id": name})
            except SelectionServiceError:
                continue
            kept.append(name)
        assert kept == left
        assert (len(service._pending), service._pending.bytes) == (0, 0)
        await service.shutdown_async()

    asyncio.run(fill())


def test_the_bounds_of_waiting_selections_are_positive() -> None:
    bounds: dict[str, Any]
    for bounds in ({"ttl_secs": 0}, {"ttl_secs": float("nan")}, {"max_entries": 0}, {"max_bytes": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bounds))} must be greater than 0"):
            SelectionCacheConfig(**bounds)


@each_case("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_of_a_block_is_one(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"^decay_fraction must be between 0\.0 and 1\.0$"):
        SelectionService().add_output_block("r", decay_fraction=fraction)


async def test_what_is_booked_at_a_worker_ends_with_it(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    await service.select_and_reserve({"token_ids": PROMPT, "selection_id": "r"})
    await service.upsert_worker(worker(1, taints=["x"]))  # the same ranks: the booking stays
    await service.prefill_complete("r")
    await service.delete_worker(1)
    await refused("not_found", 404, "reservation r not found", service.free_reservation("r"))
    await service.upsert_worker(worker(1))
    await service.select_and_reserve({"token_ids": PROMPT, "selection_id": "r"})
    assert len(service._reservations) == 1


async def test_a_reservation_that_is_never_freed_expires() -> None:
    clock = Clock()
    service = SelectionService(clock=clock)
    await service.upsert_worker(worker(1))
    await service.select_and_reserve({"token_ids": PROMPT, "selection_id": "old"})
    clock.now += 299.0
    assert service.loads()[0]["loads"][0]["active_requests"] == 1
    clock.now += 2.0
    assert service.loads()[0]["loads"][0]["active_requests"] == 0
    await service.select_and_reserve({"token_ids": PROMPT, "selection_id": "new"})
    await refused("not_found", 404, "reservation old not found", service.prefill_complete("old"))
    await service.shutdown_async()


# -- sessions -----------------------------------------------------------------------------------------------------------


async def test_a_session_stays_with_the_worker_of_its_first_reservation(service: SelectionService) -> None:
    for worker_id in (1, 2):
        await service.upsert_worker(worker(worker_id))
    asked = {"token_ids": PROMPT, "session_id": "s"}
    first = await service.select_and_reserve({**asked, "pinned_worker": {"worker_id": 1}})
    assert first["overlap"]["gpu"] == 0
    for _ in range(8):  # worker 2 has no load
        assert (await service.select(asked))["worker_id"] == 1
    with pytest.raises(ValueError, match="session s is bound to worker 1, not 2"):
        await service.select({**asked, "pinned_worker": {"worker_id": 2}})
    await service.delete_worker(1)
    await service.select({**asked, "selection_id": "again"})
    assert (await service.create_reservation({"selection_id": "again"}))["worker_id"] == 2


# -- KV events ----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_published_the_beginning_of_a_prompt_is_chosen(
    service: SelectionService, engine: Engine
) -> None:
    await service.upsert_worker(worker(1))
    await service.upsert_worker(worker(2, kv_events_endpoints={0: engine.address}))

    async def matched() -> bool:
        return bool((await service.select({"token_ids": PROMPT}))["overlap"]["disk"] == 64)

    def publish() -> None:  # a subscription takes a moment
        engine.publish(stored(PROMPT[:32]), stored(PROMPT[32:48], "CPU", 2, 3), stored(PROMPT[48:64], "DISK", 3, 4))

    await until(matched, publish)
    chosen = await service.select_and_reserve({"token_ids": PROMPT, "selection_id": "r"})
    assert chosen["worker_id"] == 2
    assert chosen["overlap"] == {"longest_matched": 64, "gpu": 32, "dp": {"0": 32}, "cpu": 48, "disk": 64}
    assert chosen["effective_prefill_tokens"] == 69 - 48  # two blocks, and three and one quarter of one
    scores = await service.overlap_scores({"token_ids": PROMPT})
    assert {key: scores[key] for key in NAMED} == NAMED
    assert [each["disk_blocks"] for each in scores["workers"]] == [0, 4]
    (snapshot,) = service.indexer_snapshot()
    assert (snapshot["model_name"], snapshot["block_size"]) == ("default", SIZE)
    blocks = [block for each in snapshot["events"] for block in each["event"]["data"]["stored"]["blocks"]]
    assert [block["tokens_hash"] for block in blocks] == block_hashes(PROMPT, SIZE)
    other = await service.select({"token_ids": PROMPT, "cache_salt": "other"})
    assert other["overlap"]["longest_matched"] == 0

    async def empty() -> bool:
        return (await service.overlap_scores({"token_ids": PROMPT}))["workers"][1]["disk_blocks"] == 0

    engine.publish(["AllBlocksCleared"])
    await until(empty)


async def test_another_address_begins_without_blocks(service: SelectionService, engine: Engine) -> None:
    async def held() -> int:
        return (await service.overlap_scores({"token_ids": PROMPT}))["workers"][0]["device_blocks"]

    async def is_held() -> bool:
        return await held() == 4

    await service.upsert_worker(worker(1, kv_events_endpoints={0: engine.address}))
    await until(is_held, lambda: engine.publish(stored(PROMPT[:64])))
    await service.patch_worker(1, {"taints": ["x"]})
    assert await held() == 4
    await service.patch_worker(1, {"kv_events_endpoints": {0: SILENT}})
    assert await held() == 0


# -- the end ------------------------------------------------------------------------------------------------------------


async def test_no_call_is_served_after_the_end(service: SelectionService) -> None:
    await service.upsert_worker(worker(1))
    service.shutdown()
    await service.shutdown_async()
    for call in (service.ready, service.loads, service.list_workers, service.indexer_snapshot):
        with pytest.raises(SelectionServiceError, match=r"^selection service is shutting down$"):
            call()
    await refused("not_ready", 503, "selection service is shutting down", service.select({"token_ids": PROMPT}))
    await refused("not_ready", 503, "selection service is shutting down", service.upsert_worker(worker(2)))


async def test_a_service_that_is_dropped_reads_no_more_events() -> None:
    loop: Any = asyncio.get_running_loop()
    read_at_first = len(loop._selector.get_map())
    service = SelectionService()
    await service.upsert_worker(worker(1))
    assert len(loop._selector.get_map()) == read_at_first + 1
    del service
    gc.collect()
    await asyncio.sleep(0)
    assert len(loop._selector.get_map()) == read_at_first


@each_case(
    "given", [{"indexer_peers": ["http://a"]}, {"replica_sync_port": 1}, {"replica_sync_peers": ["tcp://127.0.0.1:1"]}]
)
def test_peers_are_refused_with_a_sentence(given: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="SelectionService shares nothing with peers"):
        SelectionService(**given)


async def test_calls_about_peers_are_refused(service: SelectionService) -> None:
    for call in (service.register_replica_peer("tcp://a:1"), service.deregister_replica_peer("tcp://a:1"), service.recover_indexer_from_peers()):  # fmt: skip
        with pytest.raises(NotImplementedError, match="shares nothing with peers"):
            await call
    assert service.list_replica_peers() == []


@each_case("given", [{"indexer_threads": 0}, {"session_affinity_ttl_secs": 0}, {"session_affinity_ttl_secs": 10**8}])
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        SelectionService(**given)


# -- any order of calls -------------------------------------------------------------------------------------------------


class Random:
    """Random calls against a service, and what must be booked after each."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.service = SelectionService(
            clock=self.clock,
            session_affinity_ttl_secs=30,
            selection_cache=SelectionCacheConfig(ttl_secs=20.0, max_entries=5),
        )
        self.workers: dict[int, int] = {}  # id to its ranks
        self.booked: dict[str, tuple[int, int]] = {}  # reservation to worker and rank

    def prompt(self) -> list[int]:
        return list(range(self.rng.randrange(1, 100)))

    def name(self) -> str:
        return str(self.rng.randrange(12))

    async def step(self) -> None:
        rng, service = self.rng, self.service
        self.clock.now += rng.random()
        match rng.randrange(8):
            case 0:
                worker_id, ranks = rng.randrange(4), rng.randrange(3)
                if ranks:
                    await service.upsert_worker(worker(worker_id, data_parallel_size=ranks))
                    self.workers[worker_id] = ranks
                else:
                    await service.upsert_worker({"worker_id": worker_id})
                    self.workers.pop(worker_id, None)
            case 1:
                worker_id = rng.randrange(4)
                await service.delete_worker(worker_id)
                self.workers.pop(worker_id, None)
            case 2:
                await service.select(
                    {"token_ids": self.prompt(), "selection_id": self.name(), "session_id": self.name()}
                )
            case 3:
                name = self.name()
                made = await service.select_and_reserve({"token_ids": self.prompt(), "selection_id": name, "session_id": self.name()})  # fmt: skip
                assert name not in self.booked
                self.booked[name] = made["worker_id"], made["dp_rank"]
            case 4:
                name = self.name()
                made = await service.create_reservation({"selection_id": name})
                assert name not in self.booked
                self.booked[name] = made["worker_id"], made["dp_rank"]
            case 5:
                await service.prefill_complete(self.name())
            case 6:
                service.add_output_block(self.name(), decay_fraction=rng.choice([None, 0.0, 0.5]))
            case 7:
                name = self.name()
                await service.free_reservation(name)
                del self.booked[name]

    def check(self) -> None:
        alive = {name: at for name, at in self.booked.items() if at[1] < self.workers.get(at[0], 0)}
        self.booked = alive
        found = {}
        for pool in self.service.loads():
            for load in pool["loads"]:
                assert load["potential_prefill_tokens"] >= 0
                assert load["potential_decode_blocks"] >= 0
                found[load["worker_id"], load["dp_rank"]] = load["active_requests"]
        assert found == {
            (worker_id, rank): sum(at == (worker_id, rank) for at in alive.values())
            for worker_id, ranks in self.workers.items()
            for rank in range(ranks)
        }
        assert len(self.service._pending) <= 5


@pytest.mark.parametrize("seed", range(4))
async def test_loads_are_those_of_the_reservations_whatever_the_order_of_calls(seed: int) -> None:
    run = Random(seed)
    kinds = set()
    for _ in range(400):
        try:
            await run.step()
        except SelectionServiceError as error:
            kinds.add(error.kind)
        run.check()
    for name in list(run.booked):
        await run.service.free_reservation(name)
        del run.booked[name]
    run.check()
    for pool in run.service.loads():
        assert {(each["potential_prefill_tokens"], each["potential_decode_blocks"]) for each in pool["loads"]} == {
            (0, 0)
        }
    assert kinds == {"not_ready", "not_found", "conflict"}
    await run.service.shutdown_async()

"""What a client may say about where its request goes, in the kv router mode: pins, ranks, taints, tenants and questions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import KvQuery
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.worker.kv_publishing.publisher import KvEventPublisher
from support.cases import each_case
from support.frontend_cluster import Cluster, ScriptedWorker, cluster
from support.processes import until

BLOCK = 4
PROMPT = list(range(1, 34))


class Two:
    """Two workers with ranks 0 and 1. The holder has the prompt on rank 0, and the taint "gold"."""

    def __init__(self, house: Cluster) -> None:
        self.house = house
        self.holder: ScriptedWorker
        self.other: ScriptedWorker

    async def start(self) -> None:
        self.holder, self.other = [
            await self.house.worker(
                kv_cache_block_size=BLOCK,
                runtime_config=ModelRuntimeConfig(total_kv_blocks=1000, data_parallel_size=2, taints=set(taints)),
            )
            for taints in (["gold"], ["silver"])
        ]
        await self.hold()

    async def hold(self, **of: Any) -> None:
        names = sequence_hashes(block_hashes(PROMPT, BLOCK, **of))
        publisher = KvEventPublisher(self.holder.endpoint, kv_block_size=BLOCK, enable_local_indexer=True)
        publisher.publish_stored(PROMPT[: len(names) * BLOCK], [BLOCK] * len(names), names, **of)
        domains = self.house.frontend.models._rules.kv
        assert domains is not None
        (domain,) = domains._domains.values()
        rank = WorkerRank(self.holder.endpoint.connection_id())
        await until(lambda: rank in domain.placement.router.look_up(KvQuery(token_ids=PROMPT, **of), 0.0).overlaps)

    def id_of(self, name: str) -> int:
        worker: ScriptedWorker = getattr(self, name)
        return worker.endpoint.connection_id()

    async def ask(self, headers: dict[str, str] | None = None, **nvext: Any) -> Any:
        members = {"nvext": nvext} if nvext else {}
        return await self.house.client.completion(PROMPT, max_tokens=5, headers=headers or {}, **members)

    async def place_of(self, headers: dict[str, str] | None = None, **nvext: Any) -> tuple[str, int]:
        """Return which worker and rank a request went to."""
        for worker in (self.holder, self.other):
            worker.requests.clear()
        answer = await self.ask(headers, **nvext)
        assert answer.status == 200, answer.body
        (name,) = [name for name in ("holder", "other") if getattr(self, name).requests]
        (request,) = getattr(self, name).requests
        return name, request["routing"]["dp_rank"]


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with cluster(tmp_path, router_mode="kv", kv_router=KvRouterSettings(policy="default")) as house:
        found = Two(house)
        await found.start()
        yield found


@each_case(
    ("headers", "nvext", "place"),
    [
        ({}, {}, ("holder", 0)),
        ({"x-dynamo-worker-instance-id": "other"}, {}, ("other", 0)),
        ({"x-worker-instance-id": "other"}, {}, ("other", 0)),
        ({}, {"backend_instance_id": "other"}, ("other", 0)),
        ({}, {"decode_worker_id": "other"}, ("other", 0)),
        ({"x-dynamo-worker-instance-id": "other"}, {"backend_instance_id": "holder"}, ("other", 0)),
        ({"x-dynamo-dp-rank": "0"}, {}, ("holder", 0)),
        ({"x-dynamo-dp-rank": "4294967295"}, {"dp_rank": 1}, ("holder", 0)),  # the word for "no rank"
        ({"x-dynamo-worker-instance-id": "holder", "x-dynamo-dp-rank": "1"}, {}, ("holder", 1)),
        ({"x-dp-rank": "1"}, {"backend_instance_id": "other"}, ("other", 1)),
        ({"x-data-parallel-rank": "1"}, {"decode_worker_id": "other"}, ("other", 1)),
        ({}, {"backend_instance_id": "other", "dp_rank": 1}, ("other", 1)),
        ({}, {"routing_constraints": {"required_taints": ["silver"], "preferred_taints": {}}}, ("other", None)),
        ({}, {"routing_constraints": {"preferred_taints": {"gold": -50.0, "silver": 50.0}}}, ("other", None)),
        ({}, {"routing_constraints": {"preferred_taints": {"gold": 1.0}}}, ("holder", 0)),
        ({}, {"agent_hints": {"osl": 40, "priority": 2, "strict_priority": 1}}, ("holder", 0)),
        ({"x-dynamo-request-priority": "3", "x-dynamo-request-strict-priority": "1"}, {}, ("holder", 0)),
        ({}, {"router": {"ttft_target": 100.0}}, ("holder", 0)),
    ],
)
async def test_a_request_goes_where_its_client_says(
    two: Two, headers: dict[str, str], nvext: dict[str, Any], place: tuple[str, int | None]
) -> None:
    named = {"holder", "other"}
    headers = {key: str(two.id_of(value)) if value in named else value for key, value in headers.items()}
    members = {
        key: two.id_of(value) if isinstance(value, str) and value in named else value for key, value in nvext.items()
    }
    name, rank = await two.place_of(headers, **members)
    assert name == place[0]
    assert place[1] in (None, rank) or (place == ("other", 0) and rank in (0, 1))  # an equal rank is drawn


async def test_a_rank_alone_is_forced_on_the_best_worker(two: Two) -> None:
    for rank in (0, 1):
        assert (await two.place_of({"x-dynamo-dp-rank": str(rank)}))[1] == rank
        assert (await two.place_of(dp_rank=rank))[1] == rank


@each_case(
    ("headers", "nvext", "status", "message"),
    [
        ({"x-dynamo-worker-instance-id": "5"}, {}, 400, "Invalid request"),
        ({}, {"backend_instance_id": 5}, 400, "Invalid request"),
        ({"x-dynamo-worker-instance-id": "five"}, {}, 400, "x-dynamo-worker-instance-id"),
        ({"x-dynamo-dp-rank": "-1"}, {}, 400, "x-dynamo-dp-rank"),
        ({"x-dynamo-dp-rank": "7"}, {}, 400, "nvext.dp_rank"),
        ({}, {"dp_rank": 7}, 400, "nvext.dp_rank"),
        ({}, {"routing_constraints": {"required_taints": ["nobody"]}}, 500, "Internal server error"),
        ({}, {"router_config_override": {"router_temperature": 1.0}}, 400, "router_config_override"),
        ({}, {"allowed_worker_ids": [1]}, 400, "allowed_worker_ids"),
        ({}, {"overlap_score_weight": 1.0}, 400, "overlap_score_weight"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    two: Two, headers: dict[str, str], nvext: dict[str, Any], status: int, message: str
) -> None:
    answer = await two.ask(headers, **nvext)
    assert (answer.status, message in answer.body.decode()) == (status, True), answer.body


async def test_a_tenant_of_a_header_beats_that_of_the_body(two: Two) -> None:
    await two.hold(cache_salt="a")
    for headers, nvext in (
        ({"x-tenant-id": "a"}, {}),
        ({"x-tenant-id": "a"}, {"cache_salt": "b"}),
        ({"x-tenant-id": ""}, {"cache_salt": "a"}),
    ):
        assert await two.place_of(headers, **nvext) == ("holder", 0)
        assert two.holder.requests[0]["routing"]["cache_salt"] == "a"


@each_case(
    ("nvext", "place"),
    [
        ({}, ("holder", 0)),
        ({"backend_instance_id": "other"}, ("other", None)),
        ({"backend_instance_id": "other", "dp_rank": 1}, ("other", 1)),
        ({"routing_constraints": {"required_taints": ["silver"]}}, ("other", None)),
    ],
)
async def test_a_question_for_the_worker_heeds_the_same_words_and_runs_nothing(
    two: Two, nvext: dict[str, Any], place: tuple[str, int | None]
) -> None:
    members: dict[str, Any] = {
        key: two.id_of(value) if isinstance(value, str) else value for key, value in nvext.items()
    }
    answer = await two.ask(annotations=["query_instance_id:"], **members)
    found = answer.json["nvext"]["worker_id"]
    assert found["prefill_worker_id"] == found["decode_worker_id"] == two.id_of(place[0])
    assert found["prefill_dp_rank"] == found["decode_dp_rank"]
    assert place[1] in (None, found["decode_dp_rank"])
    assert two.holder.requests == two.other.requests == []


async def test_a_question_without_an_answer_is_the_error_of_the_request(two: Two) -> None:
    for nvext, status in (
        ({"backend_instance_id": 5}, 400),
        ({"routing_constraints": {"required_taints": ["nobody"]}}, 500),
    ):
        assert (await two.ask(annotations=["query_instance_id:"], **nvext)).status == status


async def test_an_explained_pin_says_that_it_was_named(two: Two) -> None:
    headers = {"x-dynamo-explain-routing": "1", "x-dynamo-worker-instance-id": str(two.id_of("other"))}
    told = (await two.ask(headers)).json["nvext"]["routing"]["decode"]
    assert told["summary"].startswith(f"Chose worker {two.id_of('other'):x}")
    assert "because the request names it." in told["summary"]
    assert {each["reason"] for each in told["excluded"]} == {"not_pinned"}
    assert told["meanings"]["not_pinned"] == "the request names another worker"


async def test_the_times_of_an_answer_say_how_much_of_the_prompt_was_cached(two: Two) -> None:
    wanted = {"extra_fields": ["timing"]}
    for headers, rate in (({}, 8 / 9), ({"x-dynamo-worker-instance-id": str(two.id_of("other"))}, 0.0)):
        timing = (await two.ask(headers, **wanted)).json["nvext"]["timing"]
        assert (timing["kv_hit_rate"], timing["router_queue_depth"]) == (pytest.approx(rate), 0)


async def test_the_other_modes_have_no_such_figures(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        await house.worker(kv_cache_block_size=BLOCK)
        answer = await house.client.completion(PROMPT, max_tokens=5, nvext={"extra_fields": ["timing"]})
    assert "kv_hit_rate" not in answer.json["nvext"]["timing"]

"""Disaggregation in the kv mode: prompts of which little is to be computed, and what is booked where and until when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import EngineShutdown, InvalidArgument, Unknown
from dynamo.frontend.args import parse_args
from dynamo.placement.prefill_bypass import BypassRules
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.router.dispatch.conditional import BYPASS_MARKER, ConditionalSettings
from dynamo.router.kv.domain import KvDomain
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.cases import each_case
from support.frontend_cluster import Cluster, Script, ScriptedWorker, cluster, fail, say
from support.patience import PATIENCE_SECONDS

BLOCK = 4
PROMPT = list(range(1, 34))  # eight complete blocks, and one token
EXPLAIN = {"x-dynamo-explain-routing": "1"}
KV = KvRouterSettings(policy="default")


def conditional(**rules: Any) -> ConditionalSettings:
    return ConditionalSettings(is_on=True, rules=BypassRules(**rules))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, router_mode="kv", kv_router=KV, conditional_disagg=conditional()) as found:
        yield found


async def add(house: Cluster, role: str, script: Script | None = None, **config: Any) -> ScriptedWorker:
    """Add a worker. Decode workers publish no KV events, as those of the native engines: their blocks are guessed."""
    is_prefill = role == "prefill"
    roles: dict[str, Any] = {"worker_type": WorkerType.Decode, "needs": [["prefill"]]}
    if is_prefill:
        roles = {"worker_type": WorkerType.Prefill, "model_type": ModelType.Prefill, "needs": [["decode"]]}
    else:
        config.setdefault("kv_event_publishing_enabled", False)
    default = say("x", finish="length", extra={"disaggregated_params": {"room": 1}}) if is_prefill else say("hello")
    worker = await house.worker(
        script or default,
        component=role,
        kv_cache_block_size=BLOCK,
        runtime_config=ModelRuntimeConfig(**{"total_kv_blocks": 1000, "max_num_batched_tokens": 64, **config}),
        wait=False,
        **roles,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        await house.frontend.models.wait_for(lambda: knows(house, worker))
    return worker


def knows(house: Cluster, worker: ScriptedWorker) -> bool:
    instance_id, models = worker.endpoint.connection_id(), house.frontend.models
    prefill = models._stages.prefill.get("m", "ns")
    pools = [*models.served(), *([prefill.workers] if prefill is not None else [])]
    return any(pool.instance(instance_id) is not None for pool in pools)


def domain(house: Cluster, role: str) -> KvDomain:
    domains = house.frontend.models._rules.kv
    assert domains is not None
    (found,) = [each for key, each in domains._domains.items() if key.role == role]
    return found


def booked(house: Cluster) -> int:
    domains = house.frontend.models._rules.kv
    assert domains is not None
    return sum(len(each.placement.router.load) + len(each.placement) for each in domains._domains.values())


def served(*workers: ScriptedWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def complete(house: Cluster, prompt: list[int] = PROMPT, **members: Any) -> Any:
    return await house.client.completion(prompt, max_tokens=5, **members)


def bypass_of(answer: Any) -> Any:
    return answer.json["nvext"]["routing"].get("bypass")


# -- conditional disaggregation ------------------------------------------------------------------------------------------


async def test_a_prompt_that_the_decode_worker_holds_goes_there_alone(house: Cluster) -> None:
    prefill, decode, other = await add(house, "prefill"), await add(house, "decode"), await add(house, "decode")
    first = await complete(house, headers=EXPLAIN)
    assert (served(prefill), sum(served(decode, other))) == ([1], 1)
    holder = decode if decode.requests else other
    second = await complete(house, headers=EXPLAIN)
    assert (served(prefill), served(holder)) == ([1], [2])
    ids = [holder.endpoint.connection_id()] * 2
    told = bypass_of(first)
    assert (told["bypasses"], told["reason"], told["prompt_tokens"], told["cached_tokens"]) == (False, "long", 33, 0)
    told = bypass_of(second)
    assert (told["bypasses"], told["reason"], told["prompt_tokens"], told["cached_tokens"]) == (True, "short", 33, 32)
    assert told["worker_id"] == holder.endpoint.connection_id()
    assert "1 of the prompt's 33 tokens" in told["summary"]
    assert "prefill" not in second.json["nvext"]["routing"]
    assert second.json["nvext"]["routing"]["decode"]["worker_id"] == ids[0]
    remote, alone = holder.requests
    assert ("prefill_result" in remote, BYPASS_MARKER in remote["annotations"]) == (True, False)
    assert ("prefill_result" in alone, BYPASS_MARKER in alone["annotations"]) == (False, True)
    assert alone["stop_conditions"]["max_tokens"] == 5
    # What decode workers hold counts for the choice of one, also behind a prefill worker.
    assert remote["router_config_override"] == {"assume_kv_reuse": False, "track_prefill_tokens": False}
    assert booked(house) == 0


async def test_without_the_flag_every_prompt_goes_to_a_prefill_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="kv", kv_router=KV) as house:
        prefill = await add(house, "prefill")
        await add(house, "decode")
        answers = [await complete(house, headers=EXPLAIN) for _ in range(3)]
        assert served(prefill) == [3]
        assert [bypass_of(answer) for answer in answers] == [None] * 3


async def test_a_client_decides_nothing_of_it(house: Cluster) -> None:
    prefill, decode = await add(house, "prefill"), await add(house, "decode")
    assert (await complete(house, nvext={"annotations": [BYPASS_MARKER, f"{BYPASS_MARKER}:true"]})).status == 200
    assert served(prefill) == [1]
    assert not any(BYPASS_MARKER in each for each in decode.requests[0]["annotations"])
    # One that names its prefill worker gets it.
    named = {"prefill_worker_id": prefill.endpoint.connection_id()}
    answer = await complete(house, nvext=named, headers=EXPLAIN)
    assert (served(prefill), bypass_of(answer)) == ([2], None)
    # One that names its decode worker is asked about that one.
    other = await add(house, "decode")
    for _ in range(2):
        assert (await complete(house, nvext={"decode_worker_id": other.endpoint.connection_id()})).status == 200
    assert (served(prefill), ["prefill_result" in each for each in other.requests]) == ([3], [True, False])


async def test_a_query_for_the_workers_says_so_and_runs_nothing(house: Cluster) -> None:
    prefill, decode = await add(house, "prefill"), await add(house, "decode")
    ids = [prefill.endpoint.connection_id(), decode.endpoint.connection_id()]
    nvext = {"annotations": ["query_instance_id:"]}
    told = [(await complete(house, nvext=nvext)).json["nvext"]["worker_id"]]
    assert (await complete(house)).status == 200
    told.append((await complete(house, nvext=nvext)).json["nvext"]["worker_id"])
    assert [each["decode_worker_id"] for each in told] == [ids[1]] * 2
    assert [each["prefill_worker_id"] for each in told] == ids
    assert (served(prefill, decode), booked(house)) == ([1, 1], 0)


async def test_a_prompt_of_a_session_is_judged_by_the_worker_that_the_session_is_bound_to(tmp_path: Path) -> None:
    settings = KvRouterSettings(policy="default", router_session_affinity_ttl_secs=60)
    session = {"x-dynamo-session-id": "s"}
    async with cluster(tmp_path, router_mode="kv", kv_router=settings, conditional_disagg=conditional()) as house:
        prefill, decode, other = await add(house, "prefill"), await add(house, "decode"), await add(house, "decode")
        first = [*range(100, 108)]
        assert (await complete(house, first, headers=session)).status == 200
        bound, free = (decode, other) if decode.requests else (other, decode)
        # The other decode worker holds this prompt, the one of the session does not.
        assert (await complete(house, nvext={"decode_worker_id": free.endpoint.connection_id()})).status == 200
        assert served(prefill, bound, free) == [2, 1, 1]
        answers = [await complete(house, headers={**session, **EXPLAIN}) for _ in range(2)]
        assert served(prefill, bound, free) == [3, 3, 1]
        assert [bypass_of(answer)["bypasses"] for answer in answers] == [False, True]
        assert {bypass_of(answer)["worker_id"] for answer in answers} == {bound.endpoint.connection_id()}
        told = (await complete(house, nvext={"annotations": ["query_instance_id:"]}, headers=session)).json["nvext"]
        assert told["worker_id"]["decode_worker_id"] == bound.endpoint.connection_id()
        assert booked(house) == 0


@each_case("refusal", [InvalidArgument("no"), Unknown("ValueError: no prefill_result")])
async def test_a_decode_worker_that_computes_no_prompts_gets_them_computed(
    tmp_path_factory: pytest.TempPathFactory, refusal: Exception
) -> None:
    directory = tmp_path_factory.mktemp("house")
    async with cluster(directory, router_mode="kv", kv_router=KV, conditional_disagg=conditional()) as house:

        async def only_decodes(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            if "prefill_result" not in body:
                raise refusal
            sink.send_tokens(list(b"hello"), finish_reason="stop")

        prefill, decode = await add(house, "prefill"), await add(house, "decode", only_decodes)
        answers = [await complete(house, headers=EXPLAIN) for _ in range(2)]
        assert [answer.json["choices"][0]["text"] for answer in answers] == ["hello"] * 2
        assert (served(prefill, decode), bypass_of(answers[1])) == ([2, 3], None)
        assert booked(house) == 0


async def test_a_decode_worker_that_is_lost_on_its_own_is_replaced(house: Cluster) -> None:
    await add(house, "prefill")
    decoders = [await add(house, "decode")]
    assert (await complete(house)).status == 200
    decoders.append(await add(house, "decode"))
    decoders[0].script = fail(EngineShutdown("going"))
    answer = await complete(house)
    assert (answer.status, served(*decoders)) == (200, [2, 1])
    assert "prefill_result" not in decoders[1].requests[0]
    assert booked(house) == 0


async def test_a_busy_prefill_worker_is_left_alone(tmp_path: Path) -> None:
    rules = conditional(policy="prefill_load", prefill_busy_threshold=0.5)  # of 64 tokens
    async with cluster(tmp_path, router_mode="kv", kv_router=KV, conditional_disagg=rules) as house:
        prefill = await add(house, "prefill")
        decode = await add(house, "decode")
        prefill.script = prefill.hold
        waiting = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
        await prefill.started.wait()
        answer = await complete(house, headers=EXPLAIN)
        assert (bypass_of(answer)["reason"], served(prefill, decode)) == ("prefill_busy", [1, 1])
        waiting.disconnect()
        await waiting.done()
        prefill.script = say("x", finish="length", extra={"disaggregated_params": {"room": 1}})
        assert (await complete(house)).status == 200
        assert served(prefill, decode) == [2, 2]
        assert booked(house) == 0


async def test_a_busy_decode_worker_computes_no_prompts(tmp_path: Path) -> None:
    rules = conditional(decode_busy_threshold=0.5)
    async with cluster(tmp_path, router_mode="kv", kv_router=KV, conditional_disagg=rules) as house:
        prefill = await add(house, "prefill")
        await add(house, "decode", total_kv_blocks=17)  # nine of them for the prompt
        answers = [await complete(house, headers=EXPLAIN) for _ in range(2)]
        assert (bypass_of(answers[1])["reason"], served(prefill)) == ("decode_busy", [2])


# -- what is booked ------------------------------------------------------------------------------------------------------


class Held:
    """A script that sends its tokens when it is let go."""

    def __init__(self, script: Script) -> None:
        self.let_go, self._script = asyncio.Event(), script

    async def __call__(self, body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await self.let_go.wait()
        await self._script(body, context, sink)


@each_case("bootstrap", [False, True])
async def test_a_prompt_counts_at_its_prefill_worker_until_the_hand_over(
    tmp_path_factory: pytest.TempPathFactory, bootstrap: bool
) -> None:
    async with cluster(tmp_path_factory.mktemp("house"), router_mode="kv", kv_router=KV) as house:
        endpoint = {"disaggregated_endpoint": {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000}}
        computes = Held(say("x", finish="length", extra={"disaggregated_params": {"room": 1}}))
        decodes = Held(say("hello"))
        prefill = await add(house, "prefill", computes, **(endpoint if bootstrap else {}))
        decode = await add(house, "decode", decodes)
        asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
        await prefill.started.wait()
        if bootstrap:
            await decode.started.wait()
        first, second = (domain(house, role).placement.router.load for role in ("prefill", "decode"))
        (rank,) = domain(house, "prefill")._ranks()
        assert (first.requests(rank), first.prefill_tokens(rank), first.decode_blocks(rank)) == (1, 33, 0)
        assert len(second) == (1 if bootstrap else 0)
        computes.let_go.set()
        await decode.started.wait()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(first):
                await asyncio.sleep(0.001)
        (rank,) = domain(house, "decode")._ranks()
        assert (second.requests(rank), second.prefill_tokens(rank), second.decode_blocks(rank)) == (1, 0, 8)
        decodes.let_go.set()
        await asked.done()
        assert booked(house) == 0


@each_case("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_frees_both_bookings(tmp_path_factory: pytest.TempPathFactory, phase: str) -> None:
    async with cluster(tmp_path_factory.mktemp("house"), router_mode="kv", kv_router=KV) as house:
        workers = {role: await add(house, role) for role in ("prefill", "decode")}
        workers[phase].script = workers[phase].hold
        asked = house.client.begin("POST", "/v1/completions", {"model": "m", "prompt": PROMPT, "stream": True})
        await workers[phase].started.wait()
        assert booked(house) > 0
        asked.disconnect()
        await workers[phase].killed.wait()
        await asked.done()
        assert booked(house) == 0


@each_case("half", ["prefill", "decode"])
async def test_a_request_that_starts_over_leaves_no_booking_behind(
    tmp_path_factory: pytest.TempPathFactory, half: str
) -> None:
    async with cluster(tmp_path_factory.mktemp("house"), router_mode="kv", kv_router=KV) as house:
        endpoint = {"disaggregated_endpoint": {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000}}
        going = EngineShutdown("going")
        prefills = [await add(house, "prefill", say("x", finish="length"), **endpoint) for _ in range(2)]
        decoders = [await add(house, "decode") for _ in range(2)]
        if half == "prefill":
            prefills[0].script = fail(going)
            for each in decoders:  # the other half holds until it is cancelled
                each.script = holds_for(each, prefills[0])
        else:
            decoders[0].script = fail(going)
        failing = prefills[0] if half == "prefill" else decoders[0]
        async with asyncio.timeout(PATIENCE_SECONDS):
            for number in count():  # chance decides between workers that cost the same
                answer = await complete(house, [number * 100 + each for each in PROMPT])
                assert answer.json["choices"][0]["text"] == "hello"
                if failing.requests:
                    break
            while booked(house):  # a prefill may end a moment after its answer
                await asyncio.sleep(0.001)


def holds_for(worker: ScriptedWorker, broken: ScriptedWorker) -> Script:
    async def script(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        if (body.get("routing") or {}).get("prefill_worker_id") == broken.endpoint.connection_id():
            await worker.hold(body, context, sink)
        else:
            sink.send_tokens(list(b"hello"), finish_reason="stop")

    return script


# -- the flags -----------------------------------------------------------------------------------------------------------

ON = ["--router-mode", "kv", "--router-conditional-disagg"]


def test_the_rules_are_json_or_a_file(tmp_path: Path) -> None:
    assert not parse_args([], {}).conditional_disagg.is_on
    assert parse_args(ON, {}).conditional_disagg == conditional()
    assert parse_args(["--load-aware"], {}).conditional_disagg.rules == BypassRules()
    text = '{"policy": "isl_or_load", "prefill_busy_threshold": 2, "eff_isl_threshold": 100}'
    expected = conditional(policy="isl_or_load", prefill_busy_threshold=2, eff_isl_threshold=100)
    assert parse_args([*ON, "--router-conditional-disagg-config", text], {}).conditional_disagg == expected
    (tmp_path / "rules.yaml").write_text("policy: isl_or_load\nprefill_busy_threshold: 2\neff_isl_threshold: 100\n")
    env = {"DYN_ROUTER_CONDITIONAL_DISAGG": "1", "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG": str(tmp_path / "rules.yaml")}
    assert parse_args(["--router-mode", "kv"], env).conditional_disagg == expected


@each_case(
    ("argv", "named"),
    [
        (["--router-conditional-disagg"], "--router-mode kv"),
        ([*ON, "--no-router-kv-events"], "KV events"),
        (["--load-aware", "--router-conditional-disagg"], "KV events"),
        ([*ON, "--router-conditional-disagg-config", "/nowhere"], "neither a JSON object nor a file"),
        ([*ON, "--router-conditional-disagg-config", "{"], "--router-conditional-disagg-config"),
        ([*ON, "--router-conditional-disagg-config", '{"policy": "x"}'], "policy"),
        ([*ON, "--router-conditional-disagg-config", '{"isl": 1}'], "isl"),
        ([*ON, "--router-conditional-disagg-config", '{"policy": "prefill_load"}'], "prefill_busy_threshold"),
        ([*ON, "--router-conditional-disagg-config", '{"eff_isl_threshold": -1}'], "eff_isl_threshold"),
    ],
)
def test_what_cannot_be_meant_ends_the_start(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(argv, {})
    assert (ended.value.code, named in capsys.readouterr().err) == (2, True), argv

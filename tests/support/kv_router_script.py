"""What the `KvRouter` of the bindings does, step by step, for either system: the same code runs in both.

As a script: `python kv_router_script.py MODEL_DIRECTORY` prints what was seen as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RoutingConstraints,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

PROMPT = list(range(1, 70))
OTHER = list(range(500, 570))
PATIENCE_SECONDS = 30


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


class Workers:
    """Two workers of one endpoint, A (with the taint "gold") and B, and what they were asked."""

    def __init__(self, planes: tuple[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.runtimes = [DistributedRuntime(loop, *planes) for _ in range(3)]
        self.names: dict[int, str] = {}
        self.requests: list[Any] = []
        self.ended: list[bool] = []  # whether the caller had gone
        self.tasks: list[asyncio.Future[None]] = []
        self.publishers: list[KvEventPublisher] = []

    async def start(self, model: str) -> None:
        for name, runtime in zip("AB", self.runtimes, strict=False):
            endpoint = runtime.endpoint("kvr.backend.generate")
            self.names[endpoint.connection_id()] = name
            self.tasks.append(asyncio.ensure_future(endpoint.serve_endpoint(self.generate)))
            config = ModelRuntimeConfig()
            config.total_kv_blocks, config.max_num_batched_tokens, config.max_num_seqs = 100, 2048, 8
            config.taints = {"gold"} if name == "A" else set()
            await register_model(
                ModelInput.Tokens,
                ModelType.Chat | ModelType.Completions,
                endpoint,
                model,
                "m",
                kv_cache_block_size=16,
                runtime_config=config,
                worker_type=WorkerType.Aggregated,
            )
            self.publishers.append(KvEventPublisher(endpoint, kv_block_size=16, enable_local_indexer=True))

    async def generate(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        mode = (request.get("extra_args") or {}).get("mode")
        try:
            for number in range(3 if mode != "long" else 10**6):
                if mode == "fail" and number == 1:
                    raise ValueError("boom")
                if context.is_stopped():
                    return
                is_last = number == 2 and mode != "long"
                yield {"token_ids": [number], "index": 0, "finish_reason": "stop" if is_last else None}
                if mode == "long":
                    await asyncio.sleep(0.01)
        finally:
            self.ended.append(context.is_stopped())

    @property
    def endpoint(self) -> Any:
        return self.runtimes[2].endpoint("kvr.backend.generate")

    def named(self, value: Any) -> Any:
        """Return a value with the names of the workers in place of their ids."""
        if isinstance(value, dict):
            return {key: self.named(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.named(each) for each in value]
        return self.names.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value


class Observer:
    """Keeps what was seen, under a name for each step."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.seen: dict[str, Any] = {}

    async def ask(self, step: str, question: Callable[[], Any]) -> Any:
        try:
            answer = self.workers.named(await question())
        except (TypeError, OverflowError) as error:
            answer = type(error).__name__
        except Exception:
            answer = "error"
        if isinstance(answer, list) and answer and isinstance(answer[0], dict):
            answer.sort(key=str)
        if isinstance(answer, dict) and "workers" in answer:
            answer["workers"].sort(key=str)
        self.seen[step] = answer
        return answer

    async def stream(self, step: str, question: Callable[[], Any]) -> None:
        chunks: list[Any] = []
        self.seen[step] = chunks
        try:
            async for chunk in await question():
                timing = (chunk.get("routing_data") or {}).get("timing")
                if timing is not None:  # times differ; which there are does not
                    chunk["routing_data"]["timing"] = {
                        **dict.fromkeys(sorted(timing)), "kv_hit_rate": timing["kv_hit_rate"]
                    }  # fmt: skip
                chunks.append(self.workers.named(chunk))
        except ValueError as error:
            chunks.append(f"ValueError: {error}")
        except Exception:
            chunks.append("error")

    async def rows(self, step: str, router: KvRouter) -> None:
        """See a dump as one row per block."""
        found: list[Any] = []
        for event in json.loads(await router.dump_events()):
            stored = event["event"]["data"]["stored"]
            before = stored["parent_hash"]
            for block in stored["blocks"]:
                row = [event["worker_id"], event["event"]["dp_rank"], event["storage_tier"], event["residency_domain"]]
                found.append([*self.workers.named(row), before, block])
                before = block["block_hash"]
        self.seen[step] = sorted(found, key=str)


async def observe(model: str, planes: tuple[str, str]) -> dict[str, Any]:
    """Return what a caller of `KvRouter` sees."""
    workers = Workers(planes)
    try:
        await workers.start(model)
        see = Observer(workers)
        await _events(see)
        await _guesses(see)
        await _requests(see)
        await _queue(see)
        return see.seen
    finally:
        for runtime in workers.runtimes:
            runtime.shutdown()
        await asyncio.wait(workers.tasks, timeout=PATIENCE_SECONDS)


async def _events(see: Observer) -> None:
    workers = see.workers
    router = KvRouter(workers.endpoint, 16, KvRouterConfig())

    async def knows(blocks: int) -> bool:
        scores: Any = await router.get_overlap_scores(PROMPT)
        return len(scores["workers"]) == 2 and sum(each["device_blocks"] for each in scores["workers"]) == blocks

    await until(lambda: knows(0))
    first, second = workers.publishers
    first.publish_stored(PROMPT[:48], [16] * 3, [1001, 1002, 1003])
    first.publish_stored(PROMPT[48:64], [16], [1004], parent_hash=1003)
    await until(lambda: knows(4))
    first.publish_removed([1004])
    first.publish_stored(PROMPT[:32], [16] * 2, [2001, 2002], lora_name="a")
    second.publish_stored(PROMPT[:32], [16] * 2, [3001, 3002], cache_salt="b")
    await until(lambda: knows(3))

    async def knows_salt() -> bool:
        return tuple(workers.named(await router.best_worker(PROMPT, cache_namespace="b"))) == ("B", 0, 2)

    await until(knows_salt)
    media = [None, {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 1]]}]}]
    await see.ask("best", lambda: router.best_worker(PROMPT))
    await see.ask("adapter", lambda: router.best_worker(PROMPT, lora_name="a"))
    await see.ask("namespace", lambda: router.best_worker(PROMPT, cache_namespace="b"))
    await see.ask("media", lambda: router.get_overlap_scores(PROMPT, block_mm_infos=media))
    await see.ask("required", lambda: router.best_worker(OTHER, routing_constraints=RoutingConstraints({"gold"})))
    nobody = RoutingConstraints({"nobody"})
    await see.ask("required of nobody", lambda: router.best_worker(PROMPT, routing_constraints=nobody))
    avoiding = RoutingConstraints(None, {"gold": -50.0})
    await see.ask("preferred", lambda: router.best_worker(OTHER, routing_constraints=avoiding))
    await see.ask("unknown override", lambda: router.best_worker(PROMPT, {"no_such_setting": 1}))
    await see.ask("bad override", lambda: router.best_worker(PROMPT, {"router_temperature": -1.0}))
    await see.ask("overlaps", lambda: router.get_overlap_scores(PROMPT))
    await see.ask("loads", lambda: router.get_potential_loads(PROMPT))
    await see.rows("dump", router)
    await see.ask("booked", lambda: router.best_worker(PROMPT, request_id="r"))
    await see.ask("booked twice", lambda: router.best_worker(PROMPT, request_id="r"))
    await see.ask("loads, booked", lambda: router.get_potential_loads(PROMPT))
    await router.mark_prefill_complete("r")
    await see.ask("loads, prefilled", lambda: router.get_potential_loads(PROMPT))
    await router.free("r")
    await see.ask("loads, freed", lambda: router.get_potential_loads(PROMPT))
    await router.best_worker(OTHER[:32], request_id="at a", routing_constraints=RoutingConstraints({"gold"}))
    await router.mark_prefill_complete("at a")
    for override in (
        None,
        {"track_prefill_tokens": False},
        {"assume_kv_reuse": False},
        {"overlap_score_credit": 0.0},
        {"prefill_load_scale": 0.0},
        {"overlap_score_weight": 0.0},
    ):
        of_weights = override is not None and "track" not in str(override) and "assume" not in str(override)
        step = f"{'weights ' if of_weights else ''}overridden: {override}"
        await see.ask(step, partial(router.best_worker, PROMPT, override))
    await router.free("at a")
    await see.ask("freed twice", lambda: router.free("r"))
    await see.ask("marked unknown", lambda: router.mark_prefill_complete("r"))
    mistakes: list[tuple[str, Any]] = [
        ("negative", [-1]),
        ("too large", [2**32]),
        ("a fraction", [1.5]),
        ("a text", "x"),
    ]
    for step, wrong in mistakes:
        await see.ask(f"token ids: {step}", partial(router.best_worker, wrong))


async def _guesses(see: Observer) -> None:
    workers = see.workers
    guessing = KvRouter(workers.endpoint, 16, KvRouterConfig(use_kv_events=False))
    decoding = KvRouter(workers.endpoint, 16, KvRouterConfig(router_track_prefill_tokens=False))
    blind = KvRouter(workers.endpoint, 16, KvRouterConfig(overlap_score_credit=0.0))

    async def is_ready() -> bool:
        return all([len(await each.get_potential_loads([])) == 2 for each in (guessing, blind, decoding)])

    await until(is_ready)
    only_a = RoutingConstraints({"gold"})
    booked: dict[str, Any] = {"request_id": "q", "routing_constraints": only_a}
    await see.ask("booked, not learned", lambda: guessing.best_worker(PROMPT, **booked))
    await guessing.free("q")
    await see.ask("nothing learned", lambda: guessing.get_overlap_scores(PROMPT))
    await guessing.best_worker(PROMPT, update_indexer=True, routing_constraints=only_a)

    async def has_learned() -> bool:
        return tuple(workers.named(await guessing.best_worker(PROMPT))) == ("A", 0, 4)

    await until(has_learned)
    await see.ask("learned", lambda: guessing.get_overlap_scores(PROMPT))
    await see.rows("dump of guesses", guessing)
    await decoding.best_worker(OTHER[:32], request_id="at a", routing_constraints=only_a)
    await decoding.mark_prefill_complete("at a")

    async def knows() -> bool:
        scores: Any = await decoding.get_overlap_scores(PROMPT)
        return sum(each["device_blocks"] for each in scores["workers"]) == 3

    await until(knows)
    await see.ask("prefill not tracked", lambda: decoding.best_worker(PROMPT))
    await see.ask("prefill tracked after all", lambda: decoding.best_worker(PROMPT, {"track_prefill_tokens": True}))
    await see.ask("loads, prefill not tracked", lambda: decoding.get_potential_loads(PROMPT))
    await decoding.free("at a")
    await see.ask("blind", lambda: blind.get_overlap_scores(PROMPT))
    await see.ask("blind dump", blind.dump_events)


async def _requests(see: Observer) -> None:
    workers = see.workers
    router = KvRouter(workers.endpoint, 16, KvRouterConfig())

    async def is_ready() -> bool:
        scores: Any = await router.get_overlap_scores(PROMPT)
        return len(scores["workers"]) == 2 and sum(each["device_blocks"] for each in scores["workers"]) == 3

    await until(is_ready)
    ids = {name: worker_id for worker_id, name in workers.names.items()}
    await see.stream("generate", lambda: router.generate(PROMPT, "m"))
    see.seen["request"] = workers.named(workers.requests[-1])
    options: dict[str, Any] = {"stop_conditions": {"max_tokens": 5}, "sampling_options": {"temperature": 0.5}}
    options |= {"output_options": {"logprobs": 1}, "extra_args": {"a": 1}, "worker_id": ids["B"], "dp_rank": 0}
    await see.stream("generate at B", lambda: router.generate(PROMPT, "m", **options))
    see.seen["request at B"] = workers.named(workers.requests[-1])
    whole = {"model": "m", "token_ids": PROMPT, "stop_conditions": {}, "sampling_options": {}, "output_options": {}}
    await see.stream("from a request", lambda: router.generate_from_request(whole))
    await see.stream("no prompt", lambda: router.generate_from_request({}))
    await see.stream("demand driven", lambda: router.generate(PROMPT, "m", response_buffer_size=0))
    await see.stream("negative buffer", lambda: router.generate(PROMPT, "m", response_buffer_size=-1))
    await see.stream("unknown worker", lambda: router.generate(PROMPT, "m", worker_id=5))
    await see.stream("fails", lambda: router.generate(PROMPT, "m", extra_args={"mode": "fail"}))
    del workers.ended[:]
    stream = await router.generate(PROMPT, "m", extra_args={"mode": "long"})
    for _ in range(3):
        await anext(stream)
    await see.ask("loads, running", lambda: router.get_potential_loads(PROMPT))
    del stream
    gc.collect()

    async def has_ended() -> bool:
        loads = await router.get_potential_loads(PROMPT)
        return bool(workers.ended) and not any(each["active_requests"] for each in loads)

    await until(has_ended)
    see.seen["dropped: the worker learned of it"] = list(workers.ended)
    await see.ask("loads, dropped", lambda: router.get_potential_loads(PROMPT))


async def _queue(see: Observer) -> None:
    workers = see.workers
    router = KvRouter(workers.endpoint, 16, KvRouterConfig(router_queue_threshold=0.005))
    at_a: dict[str, Any] = {"routing_constraints": RoutingConstraints({"gold"})}

    async def is_ready() -> bool:
        scores: Any = await router.get_overlap_scores(PROMPT)
        return len(scores["workers"]) == 2 and sum(each["device_blocks"] for each in scores["workers"]) == 3

    await until(is_ready)
    await see.ask("queued: goes at once", lambda: router.best_worker(PROMPT, request_id="first", **at_a))
    second = asyncio.ensure_future(router.best_worker(PROMPT, request_id="second", **at_a))
    third = asyncio.ensure_future(router.best_worker(OTHER, **at_a))
    for _ in range(20):
        await router.get_potential_loads(PROMPT)
    see.seen["queued: done while the worker has much to prefill"] = [second.done(), third.done()]
    await router.mark_prefill_complete("first")
    await see.ask("queued: done once that is prefilled", lambda: second)
    await router.mark_prefill_complete("second")
    await see.ask("queued: the one behind it, which books nothing", lambda: third)
    for each in ("first", "second"):
        await router.free(each)


if __name__ == "__main__":
    os.environ["DYN_FILE_KV"] = tempfile.mkdtemp()
    os.environ["DYN_EVENT_PLANE"] = "zmq"
    sys.stdout.write(json.dumps(asyncio.run(observe(sys.argv[1], ("file", "tcp")))))
    sys.stdout.flush()
    os._exit(0)  # the native runtime's threads may outlive the interpreter

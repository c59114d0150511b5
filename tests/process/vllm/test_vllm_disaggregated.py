"""Prefill and decode on two vLLMs: the blocks travel between their connectors, and the answers are those of one vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from openai import APIError
from tokenizers import Tokenizer

from dynamo.errors import DynamoException
from dynamo.reference.engine import ReferenceEngine
from dynamo.runtime.calls.context import Context
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS
from support.processes import wait
from support.vllm_cluster import PYTHON, WHY_NOT, VllmCluster, lives, parts_of, serve, tokens_of

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason=WHY_NOT),
    pytest.mark.timeout(1800),
]

QUESTIONS: Final = [
    f"Add {number} and {100 - number}, then sort 5 3 {number % 7} 9, then count to ten." for number in range(12)
]
TOKENS: Final = 48
EXTERNAL: Final = "vllm:external_prefix_cache_hits_total"


def role(name: str, mode: str, connector: dict[str, Any]) -> tuple[str, ...]:
    kind = "kv_producer" if mode == "prefill" else "kv_consumer"
    component = ("--component", "prefill") if mode == "prefill" else ()
    return (
        "--disaggregation-mode",
        mode,
        *component,
        "--kv-transfer-config",
        json.dumps({"kv_role": kind, **connector}),
    )


async def answers_of_one_engine() -> list[str]:
    """What an engine that does everything itself answers; vLLM's tokens are those of the reference engine."""
    tokenizer = Tokenizer.from_file(str(FILES / "tokenizer.json"))
    engine = ReferenceEngine(FILES)
    await engine.start(0)
    found = []
    try:
        for question in QUESTIONS:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            body = {
                "token_ids": tokenizer.encode(text, add_special_tokens=False).ids,
                "stop_conditions": {"max_tokens": TOKENS, "ignore_eos": True},
                "sampling_options": {"temperature": 0.0},
            }
            tokens: list[int] = []
            async for chunk in engine.generate(body, Context()):  # type: ignore[arg-type]
                tokens += chunk["token_ids"]
            found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    finally:
        await engine.cleanup()
    return found


def ask_all(served: VllmCluster) -> list[str]:
    with ThreadPoolExecutor(4) as pool:
        return [said for said, _ in pool.map(lambda question: served.long(TOKENS, question), QUESTIONS)]


def streams_while(
    served: VllmCluster, act: Callable[[], None], *, tokens: int = 300
) -> list[tuple[str, int] | APIError]:
    """What comes of eight streams in the middle of which something happens."""

    def one(number: int) -> tuple[str, int] | APIError:
        try:
            return served.long(tokens, QUESTIONS[number])
        except APIError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(one, number) for number in range(8)]
        time.sleep(0.7)  # into the middle of them; none of what is asserted depends on it
        act()
        return [each.result(PATIENCE_SECONDS * 3) for each in running]


def kill(served: VllmCluster, name: str) -> None:
    """SIGKILL a worker; nothing that it started may live on."""
    worker = served.workers.pop(name)
    parts = parts_of(worker)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.exit_code() == -signal.SIGKILL
    wait(lambda: not any(lives(number) for number in parts.values()), lambda: f"the end of {parts}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    if subprocess.run([PYTHON, "-c", "import nixl._api"], capture_output=True).returncode:
        pytest.skip("NIXL is not installed beside vLLM (docs/engines.md)")
    nixl = {"kv_connector": "NixlConnector"}
    with serve(tmp_path_factory.mktemp("nixl")) as cluster:
        cluster.start("prefill", *role("prefill", "prefill", nixl))
        cluster.start("decode", *role("decode", "decode", nixl))
        cluster.wait_serving()
        yield cluster


async def test_the_answers_are_those_of_one_engine_and_no_prompt_is_computed_twice(served: VllmCluster) -> None:
    assert served.ask("What is 27 + 15?").choices[0].message.content == "42"
    before = served.workers["decode"].metric(EXTERNAL)
    assert ask_all(served) == await answers_of_one_engine()
    assert served.workers["decode"].metric(EXTERNAL) - before > len(QUESTIONS) * 20
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        wait(lambda name=name: served.workers["prefill"].metric(name) == 0, lambda name=name: f"{name} to be 0")  # type: ignore[misc]


def test_what_a_decode_worker_must_compute_itself_is_right_as_well(served: VllmCluster) -> None:
    """Log probabilities of the prompt cannot come with blocks; the prefill worker's are freed all the same."""
    found = served.client.completions.create(
        model="demo", prompt="What is 27 + 15?", max_tokens=4, logprobs=1, extra_body={"prompt_logprobs": 1}
    )
    assert found.usage is not None
    assert found.usage.completion_tokens > 0
    wait(
        lambda: served.workers["prefill"].metric("vllm:kv_cache_usage_perc") == 0,
        lambda: "the prefill worker's blocks to be free",
    )
    assert "Releasing expired KV blocks" not in served.workers["prefill"].log  # they were declined, and not forgotten


async def test_a_request_that_is_no_decode_request_is_refused_by_name(served: VllmCluster) -> None:
    async with served.straight() as client:
        with pytest.raises(DynamoException, match=r"prefill_result\.disaggregated_params"):
            await tokens_of(client, {"token_ids": [5, 6], "prefill_result": {"disaggregated_params": 7}})


def test_cancelled_requests_leave_no_block_on_either_side(served: VllmCluster) -> None:
    def leave(number: int) -> None:
        stream = served.ask(QUESTIONS[number % 12], stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        for _, _event in zip(range(number % 4), stream, strict=False):
            pass
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(48)))
    for worker in served.workers.values():
        wait(lambda worker=worker: worker.metric("vllm:num_requests_running") == 0, lambda: "every request to end")  # type: ignore[misc]
        wait(lambda worker=worker: worker.metric("vllm:kv_cache_usage_perc") == 0, lambda: "every block to be free")  # type: ignore[misc]


def test_a_killed_prefill_worker_costs_no_token(served: VllmCluster) -> None:
    expected = [served.long(300, question) for question in QUESTIONS[:8]]
    answers = streams_while(served, lambda: kill(served, "prefill"))
    assert answers == expected
    assert [served.long(300, question) for question in QUESTIONS[:4]] == expected[:4]  # the decode worker does it all


def test_lost_workers_cost_no_token_and_the_last_one_ends_its_streams_with_a_typed_error(served: VllmCluster) -> None:
    nixl = {"kv_connector": "NixlConnector"}
    served.start("prefill-2", *role("prefill-2", "prefill", nixl))
    served.start("decode-2", *role("decode-2", "decode", nixl))
    served.wait_serving()
    expected = [served.long(300, question) for question in QUESTIONS[:8]]
    assert streams_while(served, lambda: kill(served, "decode")) == expected  # the other decode worker goes on
    prefill = served.workers.pop("prefill-2")
    assert streams_while(served, prefill.terminate) == expected
    assert prefill.exit_code() == 0
    assert "peers may lose" not in prefill.log  # it left once its blocks had been fetched
    for answer in streams_while(served, lambda: kill(served, "decode-2"), tokens=1500):
        assert isinstance(answer, APIError) or answer[1] == 1500  # none hangs, none is short


def test_the_example_connector_gives_the_same_answers(tmp_path: Path) -> None:
    store = tmp_path / "blocks"
    store.mkdir()
    connector = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(store)}}
    with serve(tmp_path) as cluster:
        cluster.start("prefill", *role("prefill", "prefill", connector))
        cluster.start("decode", *role("decode", "decode", connector))
        cluster.wait_serving()
        assert cluster.ask("What is 27 + 15?").choices[0].message.content == "42"
        disaggregated = ask_all(cluster)
        assert cluster.workers["decode"].metric(EXTERNAL) > 0
        kill(cluster, "prefill")
        assert ask_all(cluster) == disaggregated

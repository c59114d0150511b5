"""A chain of models: what a request keeps, gives back and is charged for, whichever of them serves it."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import CannotConnect, InvalidArgument, Unknown
from dynamo.frontend.admission.model import RequestLimit
from dynamo.frontend.base.settings.recording import RequestTraceSettings
from dynamo.protocol.model_types import ModelInput
from dynamo.protocol.records import MEDIA_KINDS, ModelRuntimeConfig
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_log import COMPLETED, RECEIVED
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, fail, say
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS
from support.pictures import RED, data_url, image_part

CHAIN = ("a", "b", "c")
METRIC = "dynamo_frontend_fallbacks_total"
SHORT = 0.05  # seconds without a first token; none of the tests waits for less than that


async def serve(house: Cluster, model: str, script: Any = None, **members: Any) -> ScriptedWorker:
    return await house.worker(script, model=model, component=model, **members)


async def hold(house: Cluster, model: str) -> ScriptedWorker:
    worker = await serve(house, model)
    worker.script = worker.hold
    return worker


async def write_text(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    """A worker that takes text, and names the model that it was sent."""
    choice = {"index": 0, "delta": {"content": f"from {body['model']}"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    head = {"id": "theirs", "object": "chat.completion.chunk", "created": 1}
    sink.send_object({"data": {**head, "choices": [choice]}})
    sink.send_object({"data": {**head, "choices": [], "usage": usage}})


async def chat(house: Cluster, **members: Any) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await house.client.chat(model="a", **members)


def text_of(answer: Any) -> str:
    text: str = answer.json["choices"][0]["message"]["content"]
    return text


def looks_at(house: Cluster, count: int, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once it was looked up so often whether a further model is there."""
    names, seen, found = house.frontend.models.names, asyncio.Event(), list[str]()
    serving = names.serving

    def noted(name: str) -> Any:
        found.append(name)
        if len(found) >= count:
            seen.set()
        return serving(name)

    monkeypatch.setattr(names, "serving", noted)
    return seen


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("trace.*"))


def idle(house: Cluster) -> bool:
    """Whether no model has a request any more."""
    return all(model.admission.in_flight == 0 for model in house.frontend.models.models())


# -- the wait ----------------------------------------------------------------------------------------------------------


async def test_the_wait_ends_no_model_while_no_other_one_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), fallback_after_seconds=SHORT) as house:
        slow = await serve(house, "a")
        go = asyncio.Event()

        async def late(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
            await go.wait()
            sink.send_tokens(list(b"from a"), finish_reason="stop")

        slow.script = late
        looked = looks_at(house, 4, monkeypatch)  # at two others, when the wait was over once and twice
        asked = house.client.begin_chat(model="a")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await looked.wait()
        go.set()
        answer = await asked.done()
        assert (answer.status, text_of(answer)) == (200, "from a")


async def test_a_model_that_becomes_ready_meanwhile_serves_after_the_next_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), fallback_after_seconds=SHORT) as house:
        await hold(house, "a")
        looked = looks_at(house, 2, monkeypatch)
        asked = house.client.begin_chat(model="a")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await looked.wait()
        await serve(house, "b", say("from b"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert text_of(await asked.done()) == "from b"


async def test_the_wait_holds_for_a_second_model_after_pieces_of_the_first(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), fallback_after_seconds=SHORT, migration_limit=0) as house:
        await serve(house, "a", fail(Unknown("x"), after=("begun",)))
        slow = await hold(house, "b")
        await serve(house, "c", say("from c"))
        assert text_of(await chat(house)) == "from c"
        async with asyncio.timeout(PATIENCE_SECONDS):
            await slow.killed.wait()


def test_a_wait_that_could_have_no_effect_is_refused(tmp_path: Path) -> None:
    async def start(**settings: Any) -> None:
        async with cluster(tmp_path, **settings):
            raise AssertionError("it started")

    with pytest.raises(InvalidArgument, match="--fallback-after-ms"):
        asyncio.run(start(fallbacks=(CHAIN,), fallback_after_seconds=1.0, fallback_on=("failed",)))
    with pytest.raises(InvalidArgument, match="names a twice"):
        asyncio.run(start(fallbacks=(CHAIN, ("a", "c"))))


# -- what the next model is sent ----------------------------------------------------------------------------------------


async def test_the_next_model_is_sent_no_more_than_its_own_length_allows(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(Unknown("x")), runtime_config=ModelRuntimeConfig(context_length=8192))
        small = await serve(house, "b", say("from b"), runtime_config=ModelRuntimeConfig(context_length=512))
        body = {"model": "a", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}]}
        answer = await house.client.call("POST", "/v1/messages", body)
        assert answer.status == 200
        assert small.requests[0]["stop_conditions"]["max_tokens"] <= 512


async def test_the_tokens_of_one_model_are_not_sent_to_the_next(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(Unknown("x")))
        await serve(house, "b", write_text, model_input=ModelInput.Text)
        answer = await chat(house, bad_words=["never"])
        assert (answer.status, text_of(answer)) == (200, "from b")


async def test_a_conversation_that_was_cut_for_one_model_is_whole_for_the_next(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        first = await serve(house, "a", fail(Unknown("x")), runtime_config=ModelRuntimeConfig(context_length=200))
        second = await serve(house, "b", say("from b"), runtime_config=ModelRuntimeConfig(context_length=8192))
        turns = [{"role": "user", "content": f"turn {number} " * 10} for number in range(4)]
        body = {"model": "a", "input": turns, "truncation": "auto"}
        answer = await house.client.call("POST", "/v1/responses", body)
        assert (answer.status, answer.headers["x-dynamo-fallback"]) == (200, "b")
        prompts = [bytes(worker.requests[0]["token_ids"]).decode() for worker in (first, second)]
        assert ["turn 0" in prompt for prompt in prompts] == [False, True]


async def test_pictures_go_to_the_next_model_that_takes_some(tmp_path: Path) -> None:
    sees = ModelRuntimeConfig(runtime_data={MEDIA_KINDS: ["image"]})
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        first = await serve(house, "a", fail(CannotConnect("x")), runtime_config=sees)
        await serve(house, "b", write_text, model_input=ModelInput.Text)
        third = await serve(house, "c", say("from c"), runtime_config=sees)
        content = [{"type": "text", "text": "what?"}, image_part(data_url(RED))]
        answer = await chat(house, content=content)
        assert (answer.status, text_of(answer)) == (200, "from c")
        assert answer.headers["x-dynamo-fallback-tried"] == "a=unavailable, b=refused"
        assert third.requests[0]["multi_modal_data"] == first.requests[0]["multi_modal_data"]
        assert third.requests[0]["multi_modal_data"] == {"image_url": [{"Url": data_url(RED)}]}
        assert house.media.held_bytes == 0


async def test_what_another_model_does_not_take_leaves_the_failure_of_the_first(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(CannotConnect("x")))
        await serve(house, "b", say("from b"), runtime_config=ModelRuntimeConfig(context_length=16))
        assert (await chat(house, content="word " * 50)).status == 503
        await serve(house, "c", say("from c"))
        answer = await chat(house, content="word " * 50)
        assert (answer.status, text_of(answer), answer.headers["x-dynamo-fallback"]) == (200, "from c", "c")


# -- what is given back --------------------------------------------------------------------------------------------------


async def test_a_request_that_no_model_has_room_for_is_refused_before_anything_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with cluster(tmp_path, max_requests_per_model=RequestLimit.parse("1"), fallbacks=(CHAIN,)) as house:
        workers = [await hold(house, model) for model in CHAIN]
        held = []
        for worker in workers:
            held.append(house.client.begin_chat(model="a"))
            await worker.started.wait()
        caplog.clear()
        assert (await chat(house)).status == 529
        assert RECEIVED not in [record.message for record in caplog.records]
        for each in held:
            each.disconnect()
            await each.done()
        assert idle(house)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_another_model_is_tried_frees_everything(tmp_path: Path, stream: bool) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(Unknown("x")))
        second = await hold(house, "b")
        third = await serve(house, "c", say("from c"))
        asked = house.client.begin_chat(model="a", stream=stream)
        await second.started.wait()
        asked.disconnect()
        await asked.done()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await second.killed.wait()
        assert (third.requests, idle(house)) == ([], True)


# -- what is counted -----------------------------------------------------------------------------------------------------


async def test_a_request_counts_for_the_model_of_its_name_also_where_that_is_not_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,)) as house:
        await serve(house, "c", say("from c"))
        assert text_of(await chat(house)) == "from c"
        labels = {"endpoint": "chat_completions", "request_type": "unary", "status": "success"}
        assert house.metric("dynamo_frontend_requests_total", model="a", **labels) == 1
        assert house.metric(METRIC, model="a", fallback="c", reason="unavailable") == 1


async def test_a_recording_has_the_answer_of_the_model_that_served(tmp_path: Path) -> None:
    trace = RequestTraceSettings(
        is_on=True, records=("request_stream", "request_payload"), path=str(tmp_path / "trace")
    )
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0, request_trace=trace) as house:
        await serve(house, "a", fail(Unknown("x"), after=("begun",)))
        await serve(house, "b", say("from b"))
        assert text_of(await chat(house)) == "from b"
    written = b"".join(gzip.decompress(data) for data in map(Path.read_bytes, files_in(tmp_path)))
    events = [json.loads(line)["event"] for line in written.splitlines()]
    (stream,) = [event["stream"] for event in events if event["event_type"] == "request_stream"]
    assert (stream["tokens"], stream["outputs"]) == ([6], [{"content": "from b", "finish_reason": "stop"}])


# -- what is shown -------------------------------------------------------------------------------------------------------

SHOWN = {"served_by": "c", "tried": "a=unavailable, b=failed"}


async def two_that_fail(house: Cluster) -> None:
    await serve(house, "a", fail(CannotConnect("x")))
    await serve(house, "b", fail(Unknown("y"), after=("begun",)))


async def test_headers_and_logs_name_the_models_that_were_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "access.jsonl"
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0, access_log=str(path)) as house:
        await two_that_fail(house)
        await serve(house, "c", say("from c"))
        answer = await chat(house)
    assert answer.headers["x-dynamo-fallback"] == "c"
    assert answer.headers["x-dynamo-fallback-tried"] == SHOWN["tried"]
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["model"] == "a"
    assert SHOWN.items() <= line.items()
    (completed,) = [record for record in caplog.records if record.message == COMPLETED and hasattr(record, "served_by")]
    assert {name: getattr(completed, name) for name in SHOWN} == SHOWN


async def test_the_inspector_shows_the_models_that_were_tried_of_a_request_that_runs_and_of_one_that_ended(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0, http_host="127.0.0.1") as house:
        await two_that_fail(house)
        third = await hold(house, "c")
        lens = Lens(house)
        asked = house.client.begin_chat(model="a")
        await third.started.wait()
        running = await lens.get(f"requests/chatcmpl-{third.contexts[0].id()}")
        asked.disconnect()
        await asked.done()
        ended = await lens.get(f"requests/chatcmpl-{third.contexts[0].id()}")
        found = await lens.get("recent", filter="fallback model:c")
    assert (running["stream"]["model"], running["stream"]["served_by"]) == ("a", "c")
    assert (ended["recent"]["model"], ended["recent"]["served_by"]) == ("a", "c")
    first, second = running["fallbacks"]
    assert running["fallbacks"] == ended["fallbacks"]
    assert (first["model"], first["next_model"], first["reason"], first["error"]) == (
        "a",
        "b",
        "unavailable",
        "CannotConnect",
    )
    assert (second["model"], second["next_model"], second["reason"], second["output_tokens"]) == ("b", "c", "failed", 5)
    assert len(second["workers"]) == 1
    assert first["at_ms"] <= second["at_ms"]
    assert len(found["data"]) == 1


# -- keys ----------------------------------------------------------------------------------------------------------------

PRICES = "[prices.a]\ninput = 1.0\noutput = 1.0\n\n[prices.b]\ninput = 1000.0\noutput = 2000.0\n"


async def left_of(house: Cluster, id: str) -> float:
    """What is left of the budget of a key, as a part of it."""
    keys = house.frontend.parts["keys"]
    found: float = keys.quotas.remaining_ratio(keys.store.identity(id))
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_budgets_and_rates_count_a_request_once_with_what_the_serving_model_took(
    tmp_path: Path, stream: bool
) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_minute": 100_000, "concurrent": 1, "burst": 1.0}
    record = key("k", limits=limits, budget={"tokens": 10_000, "period": "total"})
    boss = key("boss", role="admin")
    settings: dict[str, Any] = {"fallbacks": (CHAIN,), "migration_limit": 0, "usage_db": str(tmp_path / "usage.sqlite")}
    async with closed_cluster(tmp_path, record, boss, **settings) as house:
        await serve(house, "a", fail(Unknown("x")))
        await serve(house, "b", write_text, model_input=ModelInput.Text)
        for count in (1, 2):
            answer = await chat(house, stream=stream, headers=bearer("k"))
            assert answer.status == 200
            assert await left_of(house, "k") == pytest.approx(1 - count * 18 / 10_000)
            assert answer.headers["x-ratelimit-remaining-requests"] == str(60 - count)
        asked = house.client.begin("GET", "/admin/usage", headers=bearer("boss"), query="group_by=key,model")
        (row,) = [row for row in (await asked.done()).json["data"] if row["key"] == "k"]
        assert (row["model"], row["requests"], row["errors"], row["input"], row["output"]) == ("b", 2, 0, 22, 14)


async def test_money_is_that_of_the_model_that_served(tmp_path: Path) -> None:
    record = key("k", budget={"money": 1.0, "period": "total", "hard": True})
    async with closed_cluster(tmp_path, record, more=PRICES, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(Unknown("x")))
        await serve(house, "b", write_text, model_input=ModelInput.Text)
        assert (await chat(house, max_tokens=20, headers=bearer("k"))).status == 200
        assert await left_of(house, "k") == pytest.approx(1 - (11 * 1000 + 7 * 2000) / 1e6)


async def test_a_model_that_a_budget_cannot_pay_for_is_passed_over(tmp_path: Path) -> None:
    record = key("k", budget={"money": 0.01, "period": "total", "hard": True})
    async with closed_cluster(tmp_path, record, more=PRICES, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(CannotConnect("x")))
        dear = await serve(house, "b", say("from b"))
        assert (await chat(house, content="x" * 40, headers=bearer("k"))).status == 503
        await serve(house, "c", say("from c"))
        assert text_of(await chat(house, content="x" * 40, headers=bearer("k"))) == "from c"
        assert dear.requests == []
        assert await left_of(house, "k") == pytest.approx(1.0)  # the third one has no price


async def test_a_key_is_not_sent_to_a_model_that_it_may_not_use(tmp_path: Path) -> None:
    records = key("all"), key("some", models=["a", "c"]), key("one", models=["a"])
    async with closed_cluster(tmp_path, *records, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(CannotConnect("x")))
        await serve(house, "b", say("from b"))
        await serve(house, "c", say("from c"))
        assert text_of(await chat(house, headers=bearer("all"))) == "from b"
        assert text_of(await chat(house, headers=bearer("some"))) == "from c"
        assert (await chat(house, headers=bearer("one"))).status == 503


async def test_the_output_of_a_key_is_bounded_at_the_next_model_too(tmp_path: Path) -> None:
    record = key("k", max_tokens=5)
    async with closed_cluster(tmp_path, record, fallbacks=(CHAIN,), migration_limit=0) as house:
        await serve(house, "a", fail(Unknown("x")))
        second = await serve(house, "b", fail(Unknown("x")))
        third = await serve(house, "c", write_text, model_input=ModelInput.Text)
        assert (await chat(house, headers=bearer("k"))).status == 200
        assert second.requests[0]["stop_conditions"]["max_tokens"] == 5
        assert third.requests[0]["max_tokens"] == 5

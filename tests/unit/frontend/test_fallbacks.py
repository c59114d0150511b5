"""Other models in place of one that fails before its first token: the rule, and what a client sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import (
    Cancelled,
    CannotConnect,
    Disconnected,
    InvalidArgument,
    NoReplacement,
    Overloaded,
    ResponseTimeout,
    Unknown,
    WorkerUnavailable,
)
from dynamo.frontend.base.settings.fallbacks import next_models
from dynamo.frontend.pipeline.failures import failure_kind
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.settings.choices import FAILURE_KINDS
from support.frontend_cluster import Cluster, cluster, fail, say
from support.patience import PATIENCE_SECONDS

CHAIN = ("a", "b", "c")
METRIC = "dynamo_frontend_fallbacks_total"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CannotConnect("x"), "unavailable"), (Disconnected("x"), "unavailable"), (WorkerUnavailable("x"), "unavailable"),
        (NoReplacement("a"), "unavailable"), (RequestRejected(503, "x"), "unavailable"), (Overloaded(), "overloaded"),
        (ResponseTimeout("x"), "timeout"), (Unknown("x"), "failed"), (InvalidArgument("x"), None), (Cancelled("x"), None),
        (RequestRejected(429, "x"), None),
    ],
)  # fmt: skip
def test_the_kind_of_a_failure(error: Exception, kind: str | None) -> None:
    assert failure_kind(error) == kind


@pytest.mark.parametrize(
    ("place", "kind", "kinds", "rest"),
    [
        (0, "unavailable", FAILURE_KINDS, ("b", "c")), (1, "failed", FAILURE_KINDS, ("c",)),
        (2, "failed", FAILURE_KINDS, ()), (0, None, FAILURE_KINDS, ()), (0, "failed", ("timeout",), ()),
        (0, "timeout", ("timeout",), ("b", "c")),
    ],
)  # fmt: skip
def test_the_models_that_may_serve_next(
    place: int, kind: str | None, kinds: tuple[str, ...], rest: tuple[str, ...]
) -> None:
    assert tuple(next_models(CHAIN, place, kind, kinds)) == rest


async def house_of(house: Cluster, first: Any, *others: Any) -> None:
    for name, script in zip(CHAIN, (first, *others), strict=False):
        await house.worker(script, model=name, component=name)


async def chat(house: Cluster, **members: Any) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await house.client.chat(model="a", **members)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(CannotConnect("x"), "unavailable"), (Overloaded(), "overloaded"), (ResponseTimeout("x"), "timeout"), (Unknown("x"), "failed")],
)  # fmt: skip
async def test_the_next_model_serves_a_request_that_fails(
    tmp_path: Path, stream: bool, error: Exception, kind: str
) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await house_of(house, fail(error), say("from b"))
        answer = await chat(house, stream=stream)
        assert (answer.status, answer.headers["x-dynamo-fallback"]) == (200, "b")
        assert (answer.text() if stream else answer.json["choices"][0]["message"]["content"]) == "from b"
        assert (answer.chunks[0] if stream else answer.json)["model"] == "a"
        assert house.metric(METRIC, model="a", fallback="b", reason=kind) == 1


async def test_a_request_that_is_served_has_no_header(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,)) as house:
        await house_of(house, say("from a"), say("from b"))
        answer = await chat(house)
        assert answer.json["choices"][0]["message"]["content"] == "from a"
        assert "x-dynamo-fallback" not in answer.headers


async def test_a_clients_mistake_is_not_sent_to_others(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,)) as house:
        await house_of(house, fail(InvalidArgument("bad")), say("from b"))
        assert (await chat(house)).status == 400


async def test_a_kind_that_is_not_listed_is_the_end(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), fallback_on=("timeout",)) as house:
        await house_of(house, fail(Unknown("x")), say("from b"))
        assert (await chat(house)).status == 500


async def test_a_stream_whose_client_has_a_token_stays_where_it_is(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await house_of(house, fail(Unknown("x"), after=("begun",)), say("from b"))
        answer = await chat(house, stream=True)
        assert answer.status == 200
        assert "from b" not in answer.body.decode()
        assert "x-dynamo-fallback" not in answer.headers
        whole = await chat(house)  # nothing of which was sent
        assert whole.json["choices"][0]["message"]["content"] == "from b"


async def test_a_model_that_is_silent_is_left_for_the_next(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), fallback_after_seconds=0.05) as house:
        slow = await house.worker(model="a", component="a")
        slow.script = slow.hold
        await house.worker(say("from b"), model="b", component="b")
        answer = await chat(house, stream=True)
        assert (answer.text(), answer.headers["x-dynamo-fallback"]) == ("from b", "b")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await slow.killed.wait()
        assert house.metric(METRIC, model="a", fallback="b", reason="timeout") == 1


async def test_a_name_without_a_model_is_served_by_the_first_that_is_ready(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,)) as house:
        await house.worker(say("from c"), model="c", component="c")
        answer = await chat(house)
        assert (answer.status, answer.headers["x-dynamo-fallback"], answer.json["model"]) == (200, "c", "a")


async def test_the_failure_of_the_last_model_is_the_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await house_of(house, fail(Unknown("x")), fail(Unknown("y")), fail(ResponseTimeout("z")))
        assert (await chat(house)).status == 504


async def test_a_request_counts_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, fallbacks=(CHAIN,), migration_limit=0) as house:
        await house_of(house, fail(Unknown("x")), say("from b"))
        await chat(house)
        lines = house.frontend.metrics.expose().decode().splitlines()
        counted = [line for line in lines if line.startswith("dynamo_frontend_requests_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in counted) == 1
        assert all(model.admission.in_flight == 0 for model in house.frontend.models.models())

"""No project learns from `cached_tokens` what another one has sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo.engines.cache_scope import CacheScope
from dynamo.protocol.model_types import ModelInput
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import cluster

RECORDS = (key("a1", project="a"), key("a2", project="a"), key("b1", project="b"), key("c"))
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def salts(found: Any, *calls: tuple[str, dict[str, Any]], path: str = "/v1/chat/completions") -> list[Any]:
    worker = await found.worker()
    for id, members in calls:
        answer = await found.client.call("POST", path, {**CHAT, **members}, headers=bearer(id))
        assert answer.status == 200, answer.body
    for request in worker.requests:
        extra = ((request["extra_args"] or {}).get("nvext") or {}).get("cache_salt")
        assert extra == request["routing"].get("cache_salt")
    return [request["routing"].get("cache_salt") for request in worker.requests]


async def test_the_owner_of_a_key_is_part_of_the_cache_salt(tmp_path: Path) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [(id, {}) for id in ("a1", "a2", "b1", "c")]
    named: list[tuple[str, dict[str, Any]]] = [
        ("a1", {"cache_salt": "t"}),
        ("b1", {"nvext": {"cache_salt": "t"}}),
        ("b1", {"cache_salt": "project a\n"}),
    ]
    async with closed_cluster(tmp_path, *RECORDS) as found:
        one, same, other, alone, tenant, others_tenant, forged = await salts(found, *calls, *named)
    assert one == same
    assert len({one, other, alone, tenant, others_tenant, forged}) == 6
    assert None not in (one, other, alone)


async def test_owners_share_the_caches_where_a_setting_says_so_and_without_keys(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, *RECORDS, share_caches=True) as found:
        assert await salts(found, ("a1", {}), ("b1", {}), ("b1", {"cache_salt": "t"})) == [None, None, "t"]
    async with cluster(tmp_path / "open") as found:
        assert await salts(found, ("a1", {}), ("a1", {"cache_salt": "t"})) == [None, "t"]


async def test_a_worker_that_takes_text_gets_the_salt_in_the_body(tmp_path: Path) -> None:
    async def script(body: Any, context: Any, sink: Any) -> None:
        sink.send_object(
            {"data": {"id": "w", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}}
        )

    async with closed_cluster(tmp_path, *RECORDS) as found:
        worker = await found.worker(script, model_input=ModelInput.Text)
        for id, members in (("a1", {}), ("b1", {}), ("b1", {"nvext": {"cache_salt": "project a\n"}})):
            answer = await found.client.call("POST", "/v1/chat/completions", {**CHAT, **members}, headers=bearer(id))
            assert answer.status == 200, answer.body
    first, second, forged = worker.requests
    assert len({first["cache_salt"], second["cache_salt"], forged["cache_salt"]}) == 3
    assert forged["nvext"]["cache_salt"] == forged["cache_salt"] != "project a\n"


def test_an_engine_without_salts_uses_its_cache_for_one_salt_alone(caplog: pytest.LogCaptureFixture) -> None:
    scope = CacheScope("test")
    assert [scope.admits(salt) for salt in (None, "a", None, "a", "b", "a", "b", None)] == [
        True, True, False, True, False, False, False, False,
    ]  # fmt: skip
    assert [record.message.partition(":")[0] for record in caplog.records] == ["prefix cache of test off"]

"""The inspectors of several frontends: each shows and ends the requests of all, and whoever has no key learns nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.settings.recording import RecordingSettings
from dynamo.frontend.http.server import HttpServer
from dynamo.frontend.parts.inspector.operating import AskAbort, AskAbortMatching, AskBundle, AskDetail, AskPicture
from dynamo.frontend.parts.inspector.other_frontends import PEER_HEADER, PEER_PATH, open_other_frontends, peer_code
from dynamo.frontend.parts.inspector.pictures import PictureQuery
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.runtime.discovery.memory import MemoryDiscovery, MemoryHub
from support.access import bearer, key, secret_of, write_keys
from support.asgi_client import AsgiClient, asgi_client
from support.cases import each_case
from support.frontend_cluster import Cluster, cluster, fail, memory_runtime
from support.http_client import ask
from support.inspecting import Lens
from support.patience import PATIENCE_SECONDS

KEY = "all-frontends-share-this"
MODULE = "dynamo.frontend.parts.inspector.other_frontends"
WORKER_ANSWER = "plugh"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer as long as it takes on a machine that does other things as well."""
    monkeypatch.setattr(f"{MODULE}.ANSWER_SECONDS", PATIENCE_SECONDS)


async def talks(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    sink.send_tokens(list(WORKER_ANSWER.encode()))
    await context.async_killed_or_stopped()


class Found:
    """A frontend that others find, and its inspector."""

    def __init__(self, house: Cluster, server: HttpServer, url: str, operators: AsgiClient) -> None:
        self.house, self.server, self.url = house, server, url
        self.lens = Lens(house)
        self.lens._client = operators

    @property
    def others(self) -> list[str]:
        inspector = self.house.frontend.parts["inspector"].inspector
        assert inspector is not None
        assert inspector.others is not None
        return inspector.others.urls


@asynccontextmanager
async def frontend(
    tmp_path: Path, *, peer_key: str = KEY, inspector: Any = None, **settings: Any
) -> AsyncIterator[Found]:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    shown = InspectorSettings(advertise=url, peer_key=peer_key, **(inspector or {}))
    async with cluster(
        tmp_path, http_host="127.0.0.1", http_port=0, admin_port=0, inspector=shown, **settings
    ) as house:
        server = HttpServer(house.frontend, admin=listener)
        await server.start()
        try:
            async with asgi_client(house.frontend.admin_asgi) as operators:
                yield Found(house, server, url, operators)
        finally:
            await server.close()


@asynccontextmanager
async def two(tmp_path: Path, first: Any = None, second: Any = None) -> AsyncIterator[tuple[Found, Found]]:
    """Two frontends that have found each other, and one worker."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(frontend(tmp_path / "one", **(first or {})))
        other = await stack.enter_async_context(frontend(tmp_path / "other", **(second or {})))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (one.others == [other.url] and other.others == [one.url]):
                await asyncio.sleep(0.005)
        yield one, other


async def begin(found: Found, id: str) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await found.house.frontend.models.wait_for(lambda: bool(found.house.frontend.models.serving("m")))
    request = found.house.client.begin_chat("xyzzy", stream=True, headers={"x-request-id": id})
    await request.until(lambda each: each.body.count(b'"content"') >= 1)
    return request


async def test_each_shows_and_ends_the_requests_of_both(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        await one.house.worker(talks)
        here, there = await begin(one, "here"), await begin(other, "there")
        for found in (one, other):
            picture = await found.lens.get("snapshot", views="fleet,frontends,streams,workers")
            assert {row["client_request_id"] for row in picture["streams"]} == {"here", "there"}
            assert (picture["partial"], picture["fleet"]["frontends"], picture["fleet"]["workers"]) == ([], 2, 1)
            assert (picture["workers"][0]["running"], picture["totals"]["streams"]) == (2, 2)
            for id in ("here", "there"):
                assert (await found.lens.get(f"requests/{id}"))["stream"]["client_request_id"] == id
        ended = await one.lens.post("requests/there/abort", {"reason": "from afar"})
        assert (ended.status, ended.json["status"]) == (202, "aborting")
        assert b"from afar" in (await there.done()).body
        assert not here.is_complete
        counted = await other.lens.post("requests/abort", {"filter": "model:m"})
        assert (counted.json["matched"], counted.json["partial"]) == (1, [])
        await other.lens.post("requests/abort", {"filter": "model:m", "dry_run": False})
        assert b"request_aborted" in (await here.done()).body


async def test_keys_of_operators_are_asked_of_people_and_not_of_frontends(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "admins.toml", key("boss", role="admin"), key("looks", role="viewer"))
    closed = {"admin_keys_file": str(file)}
    async with two(tmp_path, closed, closed) as (one, other):
        await one.house.worker(talks)
        there = await begin(other, "there")
        one.lens.headers = bearer("boss")
        assert len((await one.lens.get("snapshot", views="streams"))["streams"]) == 1
        port = int(other.url.rpartition(":")[2])
        for headers in ({}, bearer("boss"), {PEER_HEADER: secret_of("boss")}):
            answer = await ask(port, PEER_PATH, msgspec.msgpack.encode(AskPicture(PictureQuery())), headers=headers)
            assert answer.status == 401
            assert b"streams" not in answer.body
        assert (await one.lens.post("requests/there/abort", {"reason": "x"})).status == 202
        assert b"request_aborted" in (await there.done()).body
        one.lens.headers = bearer("looks")
        assert (await one.lens.post("requests/there/abort")).status == 403


async def test_the_bundle_of_a_failure_is_found_at_the_other(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        await one.house.worker(fail(RuntimeError("it broke")))
        assert (await one.house.client.chat()).status == 500
        (row,) = (await other.lens.get("recent", filter="failed"))["data"]
        assert (await other.lens.get(f"errors/{row['id']}"))["id"] == row["id"]
        assert (await other.lens.begin("GET", "errors/none").done()).status == 404


async def test_one_that_does_not_answer_is_named_and_left_out_for_a_while(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        await one.house.worker(talks)
        request = await begin(one, "here")
        await other.server.close()
        for _ in range(2):  # asked, and left out
            picture = await one.lens.get("snapshot", views="streams")
            assert (picture["partial"], len(picture["streams"])) == ([other.url], 1)
        refused = await one.lens.post("requests/there/abort")
        assert (refused.status, other.url in refused.json["message"]) == (404, True)
        request.disconnect()


async def test_one_that_hangs_costs_a_second_and_not_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    async with two(tmp_path) as (one, other):
        silent = socket.create_server(("127.0.0.1", 0))  # connects, and answers nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        inspector = one.house.frontend.parts["inspector"].inspector
        assert inspector is not None
        assert inspector.others is not None
        inspector.others._urls["v1/frontends/x/1"] = url
        began = time.monotonic()
        partial = [(await one.lens.get("snapshot", views="streams"))["partial"] for _ in range(4)]
        assert all(url in each for each in partial), partial  # the other one may be late
        assert time.monotonic() - began < PATIENCE_SECONDS / 4
        assert other.url in inspector.others.urls
        silent.close()


async def test_another_key_opens_nothing(tmp_path: Path) -> None:
    async with two(tmp_path, second={"peer_key": "another-key-of-somebody"}) as (one, other):
        await one.house.worker(talks)
        request = await begin(one, "here")
        picture = await other.lens.get("snapshot", views="streams")
        assert (picture["streams"], picture["partial"]) == ([], [one.url])
        assert (await other.lens.post("requests/here/abort")).status == 404
        assert not request.is_complete
        request.disconnect()


async def test_a_code_is_for_one_address_one_question_and_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000_000
    monkeypatch.setattr(f"{MODULE}.time", SimpleNamespace(time=lambda: now / 1000))
    async with frontend(tmp_path) as found:
        port = int(found.url.rpartition(":")[2])
        question = msgspec.msgpack.encode(AskPicture(PictureQuery()))
        good = peer_code(KEY, found.url, now, question)
        cases = [
            (good, question, 200),
            ("", question, 401),
            (good[:-1], question, 401),
            ("x" + good, question, 401),
            ("\xb2" + good, question, 401),
            (good, question + b" ", 401),
            (peer_code("wrong" * 4, found.url, now, question), question, 401),
            (peer_code(KEY, "http://127.0.0.1:1", now, question), question, 401),
            (peer_code(KEY, found.url, now - 30_000, question), question, 200),
            (peer_code(KEY, found.url, now + 30_000, question), question, 200),
            (peer_code(KEY, found.url, now - 30_001, question), question, 401),
            (peer_code(KEY, found.url, now + 30_001, question), question, 401),
            *[(peer_code(KEY, found.url, now, raw), raw, 400) for raw in (b"", b"x", b"\x80")],
        ]
        for code, body, status in cases:
            answer = await ask(port, PEER_PATH, body, headers={PEER_HEADER: code.encode().decode("latin-1")})
            assert answer.status == status, (code, body, answer.body)
            assert KEY.encode() not in answer.body


async def test_each_frontend_keeps_its_own_rules(tmp_path: Path) -> None:
    shows, hides = {"shows_content": True}, {"is_read_only": True}
    kept = RecordingSettings(keep_failed_content=True)
    async with two(tmp_path, {"inspector": shows}, {"inspector": hides, "recording": kept}) as (one, other):
        worker = await one.house.worker(talks)
        here, there = await begin(one, "here"), await begin(other, "there")
        assert (await one.lens.get("requests/here"))["content"]["answers"] == [WORKER_ANSWER]
        assert (await one.lens.get("requests/there"))["content"] is None
        refused = await one.lens.post("requests/there/abort")
        assert (refused.status, "(read-only)" in refused.json["message"]) == (404, True)
        matched = await one.lens.post("requests/abort", {"filter": "model:m", "dry_run": False})
        assert (matched.json["aborted"], "(read-only)" in matched.json["partial"][0]) == (1, True)
        await here.done()
        assert not there.is_complete
        worker.script = fail(RuntimeError("broke on xyzzy"))
        await other.house.client.chat("xyzzy")
        (row,) = [each for each in (await one.lens.get("recent"))["data"] if each["status"] == 500]
        hidden = await one.lens.begin("GET", f"errors/{row['id']}").done()
        assert hidden.status == 403
        assert b"xyzzy" not in hidden.body
        there.disconnect()


async def serving(*frontends: Found) -> None:
    """Wait until they know the worker."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        for each in frontends:
            models = each.house.frontend.models
            await models.wait_for(lambda models=models: bool(models.serving("m")))  # type: ignore[misc]


def state_of(found: Found, worker: Any) -> tuple[str, str]:
    """What a frontend makes of a worker, and why."""
    inspector = found.house.frontend.parts["inspector"].inspector
    assert inspector is not None
    (row,) = [row for row in inspector.workers() if row.id == f"{worker.endpoint.connection_id():x}"]
    return row.state, row.note


async def test_a_worker_that_is_drained_at_one_is_drained_at_both(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        worker = await one.house.worker(talks)
        await serving(one, other)
        path = f"workers/{worker.endpoint.connection_id():x}"
        held = await one.lens.post(f"{path}/drain", {"reason": "new disk", "seconds": 600})
        assert (held.status, held.json["partial"]) == (200, [])
        state, why = state_of(other, worker)
        assert (state, "new disk" in why) == ("draining", True)
        assert (await other.house.client.chat()).status == 503
        events = (await other.lens.get("events"))["data"]
        assert ("token", True) in [(event["by"], "from another frontend" in event["text"]) for event in events]
        back = await other.lens.post(f"{path}/undrain")
        assert (back.status, back.json["partial"]) == (200, [])
        assert state_of(one, worker)[0] == state_of(other, worker)[0] == "ready"


async def test_a_hold_ends_everywhere_when_its_time_is_over(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        worker = await one.house.worker(talks)
        await serving(one, other)
        path = f"workers/{worker.endpoint.connection_id():x}/quarantine"
        assert (await one.lens.post(path, {"seconds": 0.05})).json["partial"] == []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while {state_of(found, worker)[0] for found in (one, other)} != {"ready"}:
                await asyncio.sleep(0.01)


async def test_who_does_not_take_a_drain_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two(tmp_path, second={"inspector": {"is_read_only": True}}) as (one, other):
        worker = await one.house.worker(talks)
        await serving(one, other)
        path = f"workers/{worker.endpoint.connection_id():x}/drain"
        held = await one.lens.post(path)
        assert (held.status, "(read-only)" in held.json["partial"][0]) == (200, True)
        assert "read-only" in held.json["message"]
        assert (state_of(one, worker)[0], state_of(other, worker)[0]) == ("draining", "ready")
        inspector = other.house.frontend.parts["inspector"].inspector
        assert inspector is not None
        inspector.settings = replace(inspector.settings, is_read_only=False)
        monkeypatch.setattr(inspector.operator, "knows", lambda _: False)
        (missing,) = (await one.lens.post(path)).json["partial"]
        assert "knows no worker" in missing


async def test_a_question_that_another_version_does_not_know_does_not_hide_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tmp_path) as (one, other):
        worker = await one.house.worker(talks)
        request = await begin(other, "there")
        await serving(one)
        older = AskPicture | AskDetail | AskBundle | AskAbort | AskAbortMatching
        monkeypatch.setattr("dynamo.frontend.parts.inspector.part.Question", older)
        held = await one.lens.post(f"workers/{worker.endpoint.connection_id():x}/drain")
        assert (held.status, held.json["partial"]) == (200, [other.url])
        picture = await one.lens.get("snapshot", views="streams")
        assert (len(picture["streams"]), picture["partial"]) == (1, [])
        request.disconnect()


@each_case("answer", [b"\xc0", b"\x80", b"", b"x"])
async def test_an_answer_of_another_version_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    async with two(tmp_path) as (one, other):
        await one.house.worker(talks)
        request = await begin(one, "here")
        assert other.house.frontend.parts["inspector"].inspector is not None
        monkeypatch.setattr(other.house.frontend.parts["inspector"].inspector._members, "_on_asked", lambda _: answer)
        picture = await one.lens.get("snapshot", views="streams")
        assert (len(picture["streams"]), picture["partial"]) == (1, ["a frontend of another version"])
        assert (await one.lens.begin("GET", "requests/none").done()).status == 404
        request.disconnect()


async def test_records_that_are_no_frontends_are_passed_over(tmp_path: Path) -> None:
    async with frontend(tmp_path) as found:
        runtime = memory_runtime()
        await runtime.start()
        store = runtime.discovery
        bad = [b"", b"[]", b'{"url": 1}', b'{"url": "file:///etc/passwd"}', b'{"url": "http://a b:1"}', b"{}"]
        for number, value in enumerate([*bad, json.dumps({"url": found.url}).encode()]):
            await store.put(f"v1/frontends/x/{number}", value)
        await store.put("v1/frontends/last/1", b'{"url": "http://127.0.0.1:9"}')
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "http://127.0.0.1:9" not in found.others:
                await asyncio.sleep(0.005)
        assert found.others == ["http://127.0.0.1:9"]
        await runtime.aclose()


@each_case(
    "settings, message",
    [
        ({"advertise": "http://a:1"}, "DYN_ADMIN_PEER_KEY"),
        ({"peer_key": "short"}, "16 characters"),
        *[
            ({"peer_key": KEY, "advertise": url}, "DYN_ADMIN_ADVERTISE")
            for url in (
                "",
                "a:1",
                "ftp://a:1",
                "http://a",
                "http://a:1/b",
                "http://u:p@a:1",
                "http://a:x",
                "http://a:99999",
                "http://a b:1",
                "http://a:1\r\nx: y",
                "http://a:1?b",
            )
        ],
    ],
)
async def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        open_other_frontends(InspectorSettings(**settings), MemoryDiscovery(MemoryHub()))

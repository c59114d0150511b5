"""The inspector's API over a real frontend and scripted workers: pictures, watches, aborts, who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.errors import InvalidArgument
from dynamo.frontend.parts.inspector.watching import MAX_VIEWERS
from dynamo.protocol.inspector.views import VIEWS
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from support.access import bearer, closed_cluster, key
from support.cases import each_case
from support.frontend_cluster import Cluster, ScriptedWorker, cluster, fail, say
from support.inspecting import Lens, Patches, messages_of
from support.patience import PATIENCE_SECONDS


class Paced:
    """A worker's script that sends a token at once, one for each `go`, and ends when it is told so, or is killed."""

    def __init__(self) -> None:
        self.tokens: asyncio.Queue[bool] = asyncio.Queue()
        self.ended = asyncio.Event()

    def go(self, count: int = 1, *, last: bool = False) -> None:
        for number in range(count):
            self.tokens.put_nowait(last and number == count - 1)

    async def script(self, body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        killed = asyncio.ensure_future(context.async_killed_or_stopped())
        sink.send_tokens([97])
        try:
            while True:
                token = asyncio.ensure_future(self.tokens.get())
                await asyncio.wait({token, killed}, return_when=asyncio.FIRST_COMPLETED)
                if killed.done():
                    token.cancel()
                    return
                sink.send_tokens([97], finish_reason="stop" if token.result() else None)
                if token.result():
                    return
        finally:
            killed.cancel()
            self.ended.set()


async def streaming(house: Cluster, **fields: Any) -> Any:
    """A stream that has had its first token."""
    request = house.client.begin_chat(stream=True, **fields)
    await request.until(lambda each: each.body.count(b'"content"') >= 1)
    return request


# -- pictures ---------------------------------------------------------------------------------------------------------


async def test_a_snapshot_shows_workers_models_and_streams_and_their_counts(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        worker = await house.worker(paced.script)
        lens = Lens(house)
        request = await streaming(house, headers={"x-request-id": "mine-1"}, max_tokens=9)
        picture = await lens.get("snapshot", views="fleet,frontends,models,workers,streams,recent,events")
        (stream,) = picture["streams"]
        name = f"{worker.endpoint.connection_id():x}"
        assert stream["client_request_id"] == "mine-1"
        assert (stream["phase"], stream["model"], stream["endpoint"]) == ("decode", "m", "chat_completions")
        assert (stream["output_tokens"], stream["max_tokens"], stream["workers"]) == (1, 9, [name])
        assert stream["is_streaming"] is True
        assert stream["prompt_tokens"] > 0
        assert stream["started_ms"] <= stream["phase_ms"] <= picture["taken_ms"]
        (row,) = picture["workers"]
        assert (row["id"], row["state"], row["running"], row["models"], row["role"]) == (name, "ready", 1, ["m"], "agg")
        (model,) = picture["models"]
        assert (model["id"], model["is_ready"], model["why_not"], model["in_flight"]) == ("ns/m", True, None, 1)
        assert picture["fleet"]["now"]["running"] == 1
        assert (picture["fleet"]["workers"], picture["fleet"]["models"], picture["fleet"]["frontends"]) == (1, 1, 1)
        assert picture["totals"]["streams"] == 1
        assert [event["kind"] for event in picture["events"]] == ["worker joined"]
        assert picture["recent"] == []
        paced.go(last=True)
        await request.done()
        after = await lens.get("snapshot", views="streams,recent,workers")
        assert after["streams"] == []
        (ended,) = after["recent"]
        assert (ended["outcome"], ended["status"], ended["output_tokens"], ended["workers"]) == ("ok", 200, 2, [name])
        assert ended["id"] == stream["id"]
        assert ended["started_ms"] == stream["started_ms"]
        assert after["workers"][0]["running"] == 0


async def test_views_that_were_not_asked_for_are_null_and_every_name_is_taken(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        lens = Lens(house)
        for view in VIEWS:
            picture = await lens.get("snapshot", views=view)
            assert [name for name in VIEWS if picture[name] is not None] == [view]


async def test_a_model_says_why_it_is_not_ready(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        await worker.stop()
        house.workers.remove(worker)
        await house.gone("m")
        await house.worker(model="p", worker_type="prefill", wait=False)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await house.frontend.models.wait_for(lambda: house.frontend.models.is_registered("p"))
        (model,) = (await Lens(house).get("snapshot", views="models"))["models"]
        assert model["is_ready"] is False
        assert "prefill" in model["why_not"]


async def test_rows_are_limited_filtered_and_sorted_and_the_total_says_how_many_there_are(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        await house.worker(paced.script)
        lens = Lens(house)
        for number in range(5):
            await streaming(house, headers={"x-request-id": f"r-{number}"})

        async def shown(**query: Any) -> tuple[list[str], int]:
            picture = await lens.get("snapshot", views="streams", **query)
            return [row["client_request_id"] for row in picture["streams"]], picture["totals"]["streams"]

        assert await shown() == ([f"r-{number}" for number in range(5)], 5)
        assert await shown(limit=2) == (["r-0", "r-1"], 5)
        assert await shown(limit=2, sort="-age") == (["r-4", "r-3"], 5)
        assert await shown(filter="r-3") == (["r-3"], 1)
        assert await shown(filter="model:x") == ([], 0)
        assert (await shown(sort="id"))[1] == 5


@each_case(
    "case",
    [
        ("filter=modle:x", "filter", "modle:x"),
        ("filter=%22", "filter", '"'),
        ("views=streams,prompts", "views", None),
        ("limit=0", "limit", None),
        ("limit=1e3", "limit", None),
        ("sort=colour", "sort", None),
        ("colour=red", "colour", None),
    ],
)
async def test_a_bad_query_is_a_400_that_names_the_part(tmp_path: Path, case: tuple[str, str, str | None]) -> None:
    query, param, part = case
    async with cluster(tmp_path) as house:
        for path in ("snapshot", "watch"):
            answer = await Lens(house).begin("GET", path, query=query).done()
            assert (answer.status, answer.json["error"]["param"]) == (400, param)
            assert part is None or answer.json["details"]["part"] == part


# -- watches ----------------------------------------------------------------------------------------------------------


async def test_a_watch_begins_with_a_picture_and_goes_on_with_patches(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        await house.worker(paced.script)
        watch = Lens(house).watch(views="streams,recent")
        await watch.until(lambda each: len(each.events) == 1)
        assert watch.headers["content-type"] == "text/event-stream"
        assert watch.headers["cache-control"] == "no-store"
        name, id, picture = messages_of(watch)[0]
        assert (name, id, picture["streams"]) == ("snapshot", str(picture["seq"]), [])
        patches = Patches(watch)
        request = await streaming(house)
        patch = await patches.until(lambda each: 1 in [row["output_tokens"] for row in each["set"].values()])
        (changed,) = patch["set"]
        assert (patch["seq"] > picture["seq"], changed.startswith("streams/chatcmpl-")) == (True, True)
        paced.go(3, last=True)
        await request.done()
        patch = await patches.until(lambda each: each["del"])
        assert patch["del"] == [changed]
        assert list(patch["set"]) == [changed.replace("streams/", "recent/")]
        watch.disconnect()
        await watch.done()
        assert len(house.frontend.parts["inspector"].inspector.watching) == 0


async def test_a_viewer_that_was_cut_off_goes_on_from_what_it_has(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker()
        lens = Lens(house)
        watch = lens.watch(views="recent")
        await watch.until(lambda each: len(each.events) == 1)
        last = messages_of(watch)[0][1]
        watch.disconnect()
        await watch.done()
        await house.client.chat()
        for query, event in (({"views": "streams"}, "snapshot"), ({"views": "recent"}, "patch")):
            again = lens.watch(last=last, **query)
            await again.until(lambda each: len(each.events) == 1)
            name, _, data = messages_of(again)[0]
            assert name == event
            again.disconnect()
            await again.done()
        assert [each.split("/")[0] for each in data["set"]] == ["recent"]
        for unknown in ("1", "x", "9" * 30, last):  # the last one was gone on from already
            again = lens.watch(last=unknown, views="recent")
            await again.until(lambda each: len(each.events) == 1)
            assert messages_of(again)[0][0] == "snapshot"
            again.disconnect()
            await again.done()


async def test_the_ninth_viewer_is_refused_and_may_come_when_another_leaves(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        lens = Lens(house)
        watches = [lens.watch(views="streams") for _ in range(MAX_VIEWERS)]
        for each in watches:
            await each.until(lambda one: len(one.events) == 1)
        refused = await lens.watch().done()
        assert (refused.status, refused.json["error"]["code"]) == (429, "too_many_viewers")
        assert "8 viewers" in refused.json["message"]
        watches[0].disconnect()
        await watches[0].done()
        late = lens.watch(views="streams")
        await late.until(lambda one: len(one.events) == 1)


async def test_a_frontend_that_stops_ends_its_watches(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        watch = Lens(house).watch(views="streams")
        await watch.until(lambda each: len(each.events) == 1)
        house.frontend.stopping()
        assert (await watch.done()).is_complete


# -- aborts -----------------------------------------------------------------------------------------------------------


async def test_an_aborted_stream_gets_an_error_event_and_its_worker_a_kill(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        await house.worker(paced.script)
        lens = Lens(house)
        request = await streaming(house)
        ((row,)) = (await lens.get("snapshot", views="streams"))["streams"]
        answer = await lens.post(f"requests/{row['id']}/abort", {"reason": "runs wild"})
        assert (answer.status, answer.json["status"], answer.json["phase"]) == (202, "aborting", "decode")
        assert answer.json["workers"] == row["workers"]
        await request.done()
        await asyncio.wait_for(paced.ended.wait(), PATIENCE_SECONDS)
        assert request.chunks[-1]["error"] == {
            "message": "This request was aborted by an operator: runs wild",
            "type": "request_aborted",
            "code": "request_aborted",
        }
        again = await lens.post(f"requests/{row['id']}/abort")
        assert (again.status, again.json["status"]) == (202, "aborted")
        (ended,) = (await lens.get("snapshot", views="recent"))["recent"]
        assert (ended["outcome"], ended["status"], ended["code"]) == ("aborted", 499, "request_aborted")
        assert [event["by"] for event in (await lens.get("snapshot", views="events"))["events"][:2]] == [
            "token",
            "token",
        ]


@each_case(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
async def test_a_request_is_found_by_the_id_of_its_answer_and_by_the_one_that_workers_log(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        worker.script = worker.hold
        lens = Lens(house)
        request = house.client.begin("POST", path, {"model": "m", **body})
        await asyncio.wait_for(worker.started.wait(), PATIENCE_SECONDS)
        ((row,)) = (await lens.get("snapshot", views="streams"))["streams"]
        logged = worker.contexts[0].id()
        for spelling in (row["id"], logged):
            assert (await lens.get(f"requests/{spelling}"))["stream"]["id"] == row["id"]
            found = await lens.get("snapshot", views="streams", filter=f"id:{spelling}")
            assert [each["id"] for each in found["streams"]] == [row["id"]]
        assert (await lens.post(f"requests/{logged}/abort")).status == 202
        await request.done()
        for spelling in (row["id"], logged):
            assert (await lens.get(f"requests/{spelling}"))["recent"]["id"] == row["id"]


async def test_a_request_without_a_token_is_aborted_with_a_status(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker()
        worker.script = worker.hold
        lens = Lens(house)
        for stream in (False, True):
            worker.killed.clear()
            worker.started.clear()
            request = house.client.begin_chat(stream=stream, headers={"x-request-id": "mine"})
            await asyncio.wait_for(worker.started.wait(), PATIENCE_SECONDS)
            assert (await lens.post("requests/mine/abort")).status == 202  # by the client's own id
            await request.done()
            await asyncio.wait_for(worker.killed.wait(), PATIENCE_SECONDS)
            assert (request.status, request.json["error"]["code"]) == (499, "request_aborted")


async def test_what_is_not_in_flight_cannot_be_aborted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker()
        done = await house.client.chat()
        for id in ("no-such", done.json["id"]):
            answer = await Lens(house).post(f"requests/{id}/abort", {"reason": "x"})
            assert (answer.status, answer.json["error"]["code"]) == (404, "request_not_found")


async def test_a_filter_is_counted_before_it_aborts(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        await house.worker(paced.script)
        lens = Lens(house)
        requests = [await streaming(house, headers={"x-request-id": f"r-{number}"}) for number in range(3)]
        counted = await lens.post("requests/abort", {"filter": "r-"})
        assert (counted.status, counted.json["matched"], counted.json["aborted"]) == (200, 3, 0)
        assert not any(each.is_complete for each in requests)
        done = await lens.post("requests/abort", {"filter": "r- !r-1", "dry_run": False, "reason": "x"})
        assert (done.status, done.json["matched"], done.json["aborted"]) == (202, 2, 2)
        await requests[0].done()
        await requests[2].done()
        assert not requests[1].is_complete
        assert (await lens.post("requests/abort", {"filter": "modle:x"})).json["details"] == {"part": "modle:x"}
        assert (await lens.post("requests/abort", {})).status == 400


# -- who may do what --------------------------------------------------------------------------------------------------


ROUTES = [("GET", "snapshot"), ("GET", "watch"), ("POST", "requests/x/abort"), ("POST", "requests/abort")]


@each_case("route", ROUTES)
async def test_without_keys_the_token_is_needed(tmp_path: Path, route: tuple[str, str]) -> None:
    async with cluster(tmp_path) as house:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}):
            answer = await Lens(house, headers=headers).begin(*route).done()
            assert (answer.status, answer.headers["cache-control"]) == (401, "no-store")


async def test_roles_of_keys(tmp_path: Path) -> None:
    roles = ("user", "viewer", "content", "operator", "admin")
    async with closed_cluster(tmp_path, *[key(role, role=role) for role in roles]) as house:
        looks, acts, chats = {}, {}, {}
        await house.worker()
        for role in roles:
            lens = Lens(house, headers=bearer(role))
            looks[role] = (await lens.begin("GET", "snapshot").done()).status
            acts[role] = (await lens.begin("POST", "requests/x/abort").done()).status
            chats[role] = (await house.client.chat(headers=bearer(role))).status
        assert looks == {"user": 403, "viewer": 200, "content": 200, "operator": 200, "admin": 200}
        assert acts == {"user": 403, "viewer": 403, "content": 403, "operator": 404, "admin": 404}
        assert chats == {"user": 200, "viewer": 403, "content": 403, "operator": 403, "admin": 200}
        assert (await Lens(house).begin("GET", "snapshot").done()).status == 401  # the token is nothing where keys are


async def test_a_read_only_inspector_does_nothing_and_says_so(tmp_path: Path) -> None:
    from dynamo.frontend.base.settings.inspector import InspectorSettings

    async with cluster(tmp_path, inspector=InspectorSettings(is_read_only=True)) as house:
        lens = Lens(house)
        answer = await lens.post("requests/x/abort")
        assert (answer.status, answer.json["error"]["code"]) == (403, "read_only")
        picture = await lens.get("snapshot", views="fleet,events")
        assert picture["fleet"]["read_only"] is True
        assert "refused with 403" in picture["events"][0]["text"]


async def test_an_inspector_that_is_switched_off_has_no_routes(tmp_path: Path) -> None:
    from dynamo.frontend.base.settings.inspector import InspectorSettings

    async with cluster(tmp_path, inspector=InspectorSettings(is_on=False)) as house:
        assert "inspector" not in house.frontend.parts
        assert (await house.client.get("/admin/v1/snapshot")).status == 404


async def test_pages_of_other_sites_get_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1") as house:
        lens = Lens(house)
        for headers in ({"host": "evil.example"}, {"host": "127.0.0.1:1", "origin": "https://evil.example"}):
            for method, path in ROUTES:
                assert (await lens.begin(method, path, **headers).done()).status == 403


async def test_actions_have_a_rate(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        lens, rate = Lens(house), house.frontend.parts["inspector"].inspector.actions.rate
        rate._now = lambda: 0.0  # no time goes by, in which others would be allowed
        statuses = [(await lens.post("requests/x/abort")).status for _ in range(25)]
        assert statuses == [404] * 20 + [429] * 5


# -- one request, what has ended, what failed -------------------------------------------------------------------------


async def test_a_request_in_full_while_it_runs_and_after_its_end(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        worker = await house.worker(paced.script)
        lens = Lens(house)
        request = await streaming(house, max_tokens=7, temperature=0.5, headers={"x-request-id": "mine"})
        running = await lens.get("requests/mine")
        name = f"{worker.endpoint.connection_id():x}"
        assert (running["stream"]["client_request_id"], running["recent"]) == ("mine", None)
        assert (running["parameters"]["max_tokens"], running["parameters"]["temperature"]) == (7, 0.5)
        assert [(each["worker"], each["outcome"]) for each in running["attempts"]] == [(name, "running")]
        phases = [each[0] for each in running["timeline"]]
        assert phases == ["admitted", "preprocess", "route", "prefill", "decode"]
        assert running["timeline"][-1][2] is None
        assert [each["candidates"][0]["worker"] for each in running["routing"]] == [name]
        assert running["content"] is None
        paced.go(last=True)
        await request.done()
        ended = await lens.get("requests/mine")
        assert (ended["stream"], ended["recent"]["outcome"]) == (None, "ok")
        assert ended["timeline"][-1][2] == ended["recent"]["ended_ms"]
        assert (await lens.begin("GET", "requests/none").done()).status == 404


async def test_the_tokens_of_a_request_that_is_looked_at_are_shown_second_by_second(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path) as house:
        await house.worker(paced.script)
        inspector = house.frontend.parts["inspector"].inspector
        assert inspector is not None
        lens = Lens(house)
        request = await streaming(house, headers={"x-request-id": "mine"})
        assert (await lens.get("requests/mine"))["token_rates"] == []
        paced.go(6)
        await request.until(lambda each: each.body.count(b'"content"') >= 7)
        rates = inspector.tables.token_rates
        ((id, first),) = rates._seen.items()
        began = first.at
        assert rates.look(id, 7, began + 2.0) == [3.0, 3.0]  # six tokens in the two seconds since the first look
        assert rates.look(id, 7, began + 2.1) == [3.0, 3.0]
        paced.go(last=True)
        await request.done()
        assert (await lens.get("requests/mine"))["token_rates"] == [3.0, 3.0]


async def test_failures_are_grouped_and_have_bundles(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(fail(RuntimeError("the marker prompt broke 17 things")))
        for _ in range(2):
            assert (await house.client.chat()).status == 500
        lens = Lens(house)
        (group,) = (await lens.get("errors"))["data"]
        assert (group["status"], group["count"], group["model"]) == (500, 2, "m")
        bundle = await lens.get(f"errors/{group['example']}")
        assert bundle["schema"] == "dynamo.failure.v1"
        recent = (await lens.get("recent", filter="failed"))["data"]
        assert [row["status"] for row in recent] == [500, 500]
        assert group["example"] == recent[0]["id"]
        assert (await lens.begin("GET", "errors/none").done()).status == 404


async def test_the_mistakes_of_clients_are_not_among_the_failures_that_an_operator_is_told_of(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(fail(RuntimeError("broken")))
        lens = Lens(house)
        await lens.get("snapshot", views="fleet")  # the first look begins the count
        for status, fields in ((400, {"temperature": 9}), (404, {"model": "none"}), (404, {"model": "nor this"})):
            assert (await house.client.chat(**fields)).status == status
        now = (await lens.get("snapshot", views="fleet"))["fleet"]["now"]
        assert now["error_share"] == 0.0
        assert (await house.client.chat()).status == 500
        now = (await lens.get("snapshot", views="fleet"))["fleet"]["now"]
        assert now["error_share"] == 0.25


async def test_no_answer_shows_what_clients_and_models_say(tmp_path: Path) -> None:
    marker, paced = "xyzzy-marker", Paced()
    async with cluster(tmp_path) as house:
        worker = await house.worker(paced.script)
        lens = Lens(house)
        asked = f'say "{marker}" {marker}'
        running = await streaming(house, content=asked, stop=[marker])
        await house.client.chat(asked, temperature=f"{marker}")
        await house.client.chat(asked, logit_bias={marker: 1})
        worker.script = fail(InvalidArgument(f"cannot do {marker} {asked}"))
        assert marker in (await house.client.chat(asked)).body.decode()
        await lens.post("routing/explain", {"model": "m", "messages": [{"role": "user", "content": asked}]})
        id = (await lens.get("snapshot", views="streams"))["streams"][0]["id"]
        queries = [("snapshot", {"views": ",".join(VIEWS)}), *[(path, {}) for path in READING], (f"requests/{id}", {})]
        queries += [(f"requests/{row['id']}", {}) for row in (await lens.get("recent"))["data"]]
        for path, query in queries:
            answer = await lens.get(path, **query)
            shown = [part for part in (answer.values() if isinstance(answer, dict) else answer) if marker in str(part)]
            assert not shown, (path, shown)
        watch = lens.watch(views=",".join(VIEWS))
        await watch.until(lambda each: len(each.events) == 1)
        assert marker.encode() not in watch.body
        running.disconnect()


READING = ("recent", "errors", "routing/recent", "events", "config")


async def test_the_settings_in_force_are_shown_without_secrets(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="0123456789abcdef-secret", max_requests_in_flight=7) as house:
        answer = await Lens(house, headers={"authorization": "Bearer x"}).begin("GET", "config").done()
        assert answer.status == 401
    async with cluster(tmp_path, max_requests_in_flight=7) as house:
        rows = {row["name"]: row for row in await Lens(house).get("config")}
        assert (rows["--max-requests-in-flight"]["value"], rows["--max-requests-in-flight"]["origin"]) == (7, "flag")
        assert rows["--http-port"]["origin"] == "default"
        assert rows["DYN_API_KEY"]["value"] is None


# -- workers ----------------------------------------------------------------------------------------------------------


async def two_workers(house: Cluster) -> tuple[dict[str, ScriptedWorker], list[str]]:
    workers = [await house.worker(), await house.worker()]
    found = {f"{each.endpoint.connection_id():x}": each for each in workers}
    return found, sorted(found)


async def test_a_drained_worker_gets_no_new_requests_until_it_is_undrained(tmp_path: Path) -> None:
    paced = Paced()
    async with cluster(tmp_path, router_mode="round-robin") as house:
        workers, (one, other) = await two_workers(house)
        lens = Lens(house)
        workers[one].script = workers[other].script = paced.script
        running = [await streaming(house) for _ in range(2)]
        answer = await lens.post(f"workers/{one}/drain", {"reason": "new driver"})
        assert (answer.status, answer.json["state"], answer.json["running"]) == (200, "draining", 1)
        assert "new driver" in answer.json["message"]
        workers[one].script = workers[other].script = say("x")
        for _ in range(4):
            assert (await house.client.chat()).status == 200
        assert len(workers[one].requests) == 1
        assert len(workers[other].requests) == 5
        assert not any(each.is_complete for each in running)  # what runs goes on
        assert (await lens.post(f"workers/{other}/drain")).status == 200
        assert (await house.client.chat()).status == 503
        for id in (one, other):
            assert (await lens.post(f"workers/{id}/undrain")).json["state"] == "ready"
        for _ in range(2):
            assert (await house.client.chat()).status == 200
        assert len(workers[one].requests) == 2
        assert (await lens.post("workers/77/drain")).status == 404
        assert (await lens.post(f"workers/{one}/drain", {"seconds": -1})).status == 400


async def test_a_quarantined_worker_is_the_last_choice_for_a_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        workers, (one, other) = await two_workers(house)
        lens = Lens(house)
        answer = await lens.post(f"workers/{one}/quarantine", {"seconds": 600})
        assert (answer.json["state"], answer.json["until_ms"] is not None) == ("quarantined", True)
        for _ in range(3):
            await house.client.chat()
        assert len(workers[one].requests) == 0
        await lens.post(f"workers/{other}/drain")
        assert (await house.client.chat()).status == 200  # where nothing else is left
        assert len(workers[one].requests) == 1


@each_case("mode", ["round-robin", "random", "power-of-two", "least-loaded", "device-aware-weighted", "kv"])
async def test_an_explanation_shows_every_candidate_and_changes_nothing(tmp_path: Path, mode: str) -> None:
    async with cluster(tmp_path, router_mode=mode) as house:
        card: dict[str, Any] = {"kv_cache_block_size": 4} if mode == "kv" else {}
        workers = [await house.worker(**card) for _ in range(3)]
        lens = Lens(house)
        names = sorted(f"{each.endpoint.connection_id():x}" for each in workers)
        asked = {"model": "m", "token_ids": list(range(1, 20))}
        found = []
        for _ in range(3):
            answer = await lens.post("routing/explain", asked)
            assert answer.status == 200, answer.body
            (decision,) = answer.json["routing"]
            assert sorted(each["worker"] for each in decision["candidates"]) == names
            found.append(next(each["worker"] for each in decision["candidates"] if each["is_chosen"]))
            assert decision["prompt_tokens"] == 19
            assert decision["decided_by"]
        assert len(set(found)) == 1
        assert all(not each.requests for each in workers)
        await lens.post(f"workers/{found[0]}/drain")
        (decision,) = (await lens.post("routing/explain", {"model": "m", "prompt": "hi"})).json["routing"]
        left_out = {each["worker"]: each["left_out"] for each in decision["candidates"]}
        assert left_out[found[0]] is not None
        assert (await lens.post("routing/explain", {"model": "m"})).status == 400
        assert (await lens.post("routing/explain", {"model": "x", "prompt": "hi"})).status == 404
        assert (await lens.post("routing/explain", {"model": "m", "prompt": "a", "token_ids": [1]})).status == 400


async def test_decisions_are_shown_also_those_before_the_first_look(tmp_path: Path) -> None:
    async with cluster(tmp_path, router_mode="round-robin") as house:
        await two_workers(house)
        lens = Lens(house)
        before = await house.client.chat()
        (row,) = (await lens.get("routing/recent"))["data"]
        assert (row["request_id"], [each["is_chosen"] for each in row["candidates"]]) == (before.json["id"], [True])
        after = await house.client.chat()
        row, _ = (await lens.get("routing/recent"))["data"]
        assert (row["request_id"], row["decided_by"], row["policy"]) == (
            after.json["id"], "each worker in turn", "round-robin",
        )  # fmt: skip
        assert [each["is_chosen"] for each in row["candidates"]] == [True, False]  # with all candidates, once looked at

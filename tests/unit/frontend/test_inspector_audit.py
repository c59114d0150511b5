"""Every action of the inspector is a line of the audit log before it is answered, whatever became of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.parts.inspector.routes import INSPECTOR_PATH, InspectorRoutes
from support.access import bearer, closed_cluster, key
from support.asgi_client import AsgiClient
from support.frontend_cluster import Cluster

REASON = {"reason": "for the audit"}


class Action(NamedTuple):
    """A route that acts, and two ways to call it."""

    route: str
    path: str  # with the id of what is there
    unknown: str  # with one that is not
    body: Mapping[str, Any] = REASON
    done: int = 200


def actions(worker: str) -> list[Action]:
    return [
        Action("requests/{id:path}/abort", "requests/mine/abort", "requests/none/abort", done=202),
        Action("requests/abort", "requests/abort", "", {"filter": "model:x", "dry_run": False} | REASON, done=202),
        *[
            Action(f"workers/{{id}}/{name}", f"workers/{worker}/{name}", f"workers/7/{name}")
            for name in ("drain", "quarantine", "undrain")
        ],
    ]


@asynccontextmanager
async def audited(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Cluster, list[Action], Path]]:
    """A frontend with keys and an audit log, a worker, and a request in flight that its client calls `mine`."""
    path, keys = tmp_path / "audit.jsonl", [key(role, role=role) for role in ("viewer", "operator", "admin")]
    async with closed_cluster(tmp_path, *keys, audit_log=str(path), http_host="127.0.0.1", **settings) as house:
        worker = await house.worker()
        worker.script = worker.hold
        house.client.begin_chat(headers={"x-request-id": "mine"} | bearer("admin"))
        await worker.started.wait()
        yield house, actions(f"{worker.endpoint.connection_id():x}"), path


def new_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("")
    return lines


def no_rate(house: Cluster) -> None:
    """Let operators act as often as they like."""
    inspector = house.frontend.parts["inspector"].inspector
    assert inspector is not None
    inspector.actions.rate.take = lambda: True


async def test_the_table_has_all_actions(tmp_path: Path) -> None:
    async with audited(tmp_path) as (house, table, _):
        assert house.frontend.parts["inspector"].inspector is not None
        routes = InspectorRoutes(house.frontend.parts["inspector"].inspector, BodyBudget(SharedBound(1, None))).routes()
        acting = {path for path, _, _, access in routes if access is Access.OPERATE}
        assert acting == {INSPECTOR_PATH + action.route for action in table}


async def test_every_action_is_a_line_whatever_became_of_it(tmp_path: Path) -> None:
    async with audited(tmp_path) as (house, table, path):
        no_rate(house)
        other_site = {"origin": "https://evil.example"}
        for app, action in itertools.product((house.client, AsgiClient(house.frontend.admin_asgi)), table):
            calls: list[tuple[str, Mapping[str, Any], dict[str, str], int, str | None]] = [
                (action.path, action.body, {}, 401, None),
                (action.path, action.body, {"authorization": "Bearer no"}, 401, None),
                (action.path, action.body, bearer("viewer"), 403, "viewer"),
                (action.path, action.body, bearer("operator") | other_site, 403, "operator"),
                (action.path, {"reason": 7}, bearer("operator"), 400, "operator"),
                (action.path, action.body, bearer("operator"), action.done, "operator"),
                *([(action.unknown, action.body, bearer("admin"), 404, "admin")] if action.unknown else []),
            ]
            for called, body, headers, status, id in calls:
                answer = await app.call("POST", INSPECTOR_PATH + called, dict(body), headers=headers)
                assert answer.status == status, (called, answer.body)
                (line,) = new_lines(path)
                assert (line["action"], line["status"]) == (f"POST {INSPECTOR_PATH}{called}", status)
                assert line["key_id"] == id
                assert line["asked"] == (None if status in (401, 403) else body)  # what is refused so is not read
                assert line["request_id"] == answer.headers["x-request-id"]
                error = {} if status < 400 else answer.json["error"]
                assert line["code"] == (error.get("code") or error.get("type"))
                assert "s3cr3t" not in json.dumps(line)


async def test_an_action_that_a_read_only_inspector_refuses_is_a_line(tmp_path: Path) -> None:
    async with audited(tmp_path, inspector=InspectorSettings(is_read_only=True)) as (house, table, path):
        for action in table:
            answer = await house.client.call("POST", INSPECTOR_PATH + action.path, REASON, headers=bearer("operator"))
            (line,) = new_lines(path)
            assert (answer.status, line["status"], line["code"]) == (403, 403, "read_only")
            assert line["key_id"] == "operator"


async def test_an_action_that_comes_too_often_is_a_line(tmp_path: Path) -> None:
    async with audited(tmp_path) as (house, table, path):
        assert house.frontend.parts["inspector"].inspector is not None
        rate = house.frontend.parts["inspector"].inspector.actions.rate
        rate._now = lambda: 0.0  # no time goes by, in which others would be allowed
        while rate.take():
            pass
        for action in table:
            answer = await house.client.call("POST", INSPECTOR_PATH + action.path, REASON, headers=bearer("operator"))
            (line,) = new_lines(path)
            assert (answer.status, line["status"], line["code"]) == (429, 429, "rate_limit_exceeded")


async def test_a_question_is_no_action_and_what_it_asks_is_in_no_line(tmp_path: Path) -> None:
    async with audited(tmp_path) as (house, _, path):
        asked = {"model": "m", "prompt": "the marker prompt"}
        for headers, status in ((bearer("viewer"), 200), ({}, 401)):
            answer = await house.client.call("POST", INSPECTOR_PATH + "routing/explain", asked, headers=headers)
            assert answer.status == status, answer.body
        (line,) = new_lines(path)
        assert (line["status"], line["asked"], line["before"]) == (401, None, None)

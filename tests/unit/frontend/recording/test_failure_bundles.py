"""What is kept of a request that failed, as a frontend keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import Disconnected, Unknown
from dynamo.frontend.base.failures import FailureRing
from dynamo.frontend.base.settings.recording import RecordingSettings
from dynamo.router.dispatch.course import Course, CourseRules, Event, Instruction
from dynamo.router.dispatch.course_log import read_courses, replay
from support.frontend_cluster import Cluster, cluster, fail, say

PROMPT = "a marker that nothing else contains"


def ring(house: Cluster) -> FailureRing:
    notes = house.frontend.parts["recording"].failures
    assert notes is not None
    return notes.ring


def only_bundle(house: Cluster) -> dict[str, Any]:
    (failure,) = ring(house).recent()
    found = ring(house).bundle(failure.id)
    assert found is not None
    return found


async def test_a_request_that_an_engine_fails_is_kept_with_its_way_and_without_its_text(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker(fail(Unknown(f"cannot serve {PROMPT!r}"), after=("some",)))
        headers = {"authorization": "Bearer sk-very-secret-key", "x-request-id": "mine"}
        await house.client.chat(PROMPT, headers=headers, temperature=0.5)
        bundle = only_bundle(house)
        assert ring(house).bundle(worker.contexts[0].id()) == bundle  # by the id that workers and logs have
    worker_id = f"{worker.endpoint.connection_id():x}"
    assert "marker" not in json.dumps(bundle)
    assert "sk-very" not in json.dumps(bundle)
    assert bundle["request_id"] == "mine"
    error = bundle["error"]
    assert (error["status"], error["type"], error["answered"]) == (500, "internal", "Internal server error")
    assert f"[{len(PROMPT)} characters of the request]" in error["message"]
    assert error["message"].startswith("Unknown: cannot serve")
    request = bundle["request"]
    assert (request["path"], request["endpoint"], request["model"]) == ("/v1/chat/completions", "chat_completions", "m")
    assert request["content"] == "omitted"
    assert request["body"]["temperature"] == 0.5
    assert request["body"]["messages"][0]["content"]["characters"] == len(PROMPT)
    assert [(attempt["worker"], attempt["outcome"]) for attempt in bundle["attempts"]] == [(worker_id, "failed")]
    assert bundle["routing"]["generate"]["worker_id"] == worker.endpoint.connection_id()
    assert bundle["tokens"]["output"] == 4
    assert list(bundle["phases_ms"])[:4] == ["received", "admitted", "preprocessed", "dispatched"]
    assert any("failed with 500" in line for line in bundle["log"])
    assert bundle["process"]["version"]


async def test_a_request_that_breaks_a_rule_is_kept_with_its_parameters(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker()
        await house.client.chat(PROMPT, temperature=9)
        bundle = only_bundle(house)
        (group,) = ring(house).grouped()
    assert bundle["request"]["body"]["temperature"] == 9
    assert bundle["error"]["status"] == 400
    assert (group.status, group.worker, group.count) == (400, "", 1)
    assert "Temperature" in group.template
    assert "attempts" not in bundle


async def test_a_migrated_request_that_fails_in_the_end_names_every_attempt(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        for _ in range(2):
            await house.worker(fail(Disconnected("the worker is gone"), after=("some",)))
        await house.client.chat(PROMPT, stream=True)
        bundle = only_bundle(house)
    assert len({attempt["worker"] for attempt in bundle["attempts"]}) == 2
    assert [attempt["error"] for attempt in bundle["attempts"]] == ["Disconnected: the worker is gone"] * 2
    assert [move["after_first_token"] for move in bundle["moves"]] == [True, True]
    assert len(bundle["workers"]) == 2


async def test_the_course_of_a_failed_request_is_kept_and_decides_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    step = Course.step

    def noted(course: Course, event: Event) -> Instruction:
        made.append(type(instruction := step(course, event)).__name__)
        return instruction

    async with cluster(tmp_path) as house:
        for _ in range(2):
            await house.worker(fail(Disconnected(f"lost over {PROMPT!r}")))
        monkeypatch.setattr(Course, "step", noted)
        await house.client.chat(PROMPT)
        monkeypatch.undo()
        bundle = only_bundle(house)
    (course,) = read_courses(json.dumps(bundle).encode())
    steps = replay(course)
    made = made[: len(steps)]  # the bundle itself was made by another run of it
    assert [str(each.then["is"]).replace("_", "") for each in steps] == [each.lower() for each in made]
    assert made == ["OpenStream", "Read", "Choose", "OpenStream", "Read", "Choose", "Fail"]
    assert steps == course.steps
    assert (course.rules, course.state) == (CourseRules(retries=3), "failed")
    assert "marker" not in json.dumps(bundle["courses"])


async def test_content_is_kept_where_that_was_asked_for(tmp_path: Path) -> None:
    async with cluster(tmp_path, recording=RecordingSettings(keep_failed_content=True)) as house:
        await house.worker(fail(Unknown("no")))
        await house.client.chat(PROMPT)
        bundle = only_bundle(house)
    assert bundle["request"]["content"] == "whole"
    assert bundle["request"]["body"]["messages"][0]["content"] == PROMPT
    assert bundle["process"]["settings"]["recording"] == {"keep_failed_content": True}


async def test_what_is_turned_away_is_counted_only(tmp_path: Path) -> None:
    async with cluster(tmp_path, max_requests_in_flight=1) as house:
        worker = await house.worker()
        worker.script = worker.hold
        house.client.begin_chat("hi")
        await worker.started.wait()
        assert (await house.client.chat("hi")).status == 529
        (group,) = ring(house).grouped()
        assert (group.status, group.count, group.example_id) == (529, 1, None)
        assert ring(house).recent() == []


async def test_a_request_that_succeeds_or_whose_client_leaves_is_no_failure(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        worker = await house.worker(say("hello"))
        assert (await house.client.chat("hi")).status == 200
        worker.script = worker.hold
        worker.started.clear()
        left = house.client.begin_chat("hi")
        await worker.started.wait()
        left.disconnect()
        await left.done()
        assert ring(house).total == 0


async def test_a_failure_that_cannot_be_noted_is_answered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(fail(Unknown("no")))
        monkeypatch.setattr(ring(house), "add", lambda *_: 1 / 0)
        assert (await house.client.chat("hi")).status == 500
    assert "no bundle was made" in caplog.text

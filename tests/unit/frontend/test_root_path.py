"""A prefix of all paths, and paths with slashes too many: they are the same paths, to every check as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.args import parse_args
from support.access import bearer, closed_cluster, key
from support.frontend_cluster import Cluster, cluster, say

BODY = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}]}
BROWSER = {"accept": "text/html"}


async def get(house: Cluster, path: str, **headers: str) -> Any:
    return await house.client.call("GET", path, headers=headers)


async def test_the_pages_follow_the_prefix_and_both_ways_are_served(tmp_path: Path) -> None:
    async with cluster(tmp_path, root_path="/team/llm") as house:
        await house.worker(say("hello"), model="org/m")
        for prefix in ("/team/llm", ""):
            answer = await house.client.call("POST", f"{prefix}/v1/chat/completions", BODY)
            assert answer.json["choices"][0]["message"]["content"] == "hello"
            assert (await get(house, f"{prefix}/v1/models/org%2Fm")).json["id"] == "org/m"
            assert (await get(house, f"{prefix}/health")).status == 200
        plain = (await get(house, "/team/llm")).body.decode()
        assert "/team/llm/v1/chat/completions" in plain
        home = (await get(house, "/team/llm/", **BROWSER)).body.decode()
        links = re.findall(r'href="([^"]+)"', home)
        assert links
        for link in links:
            assert link.startswith("/team/llm/")
            assert (await get(house, link)).status == 200
        page = (await get(house, "/team/llm/docs")).body.decode()
        for found in re.findall(r'(?:src|spec-url)="([^"]+)"', page):
            assert found.startswith("/team/llm/")
            assert (await get(house, found)).status == 200
        assert (await get(house, "/team/llm/openapi.json")).json["servers"] == [{"url": "/team/llm"}]
        assert (await get(house, "/team/llm/inspect")).headers["location"] == "/team/llm/inspect/"
        assert (await get(house, "/team/llmx/health")).status == 404
        assert (await get(house, "/team/health")).status == 404


async def test_without_a_prefix_nothing_stands_before_the_paths(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        assert "servers" not in (await get(house, "/openapi.json")).json
        assert 'spec-url="/openapi.json"' in (await get(house, "/docs")).body.decode()


def spellings(path: str) -> list[str]:
    """A path with slashes too many, some of them encoded."""
    return [f"/{path}", f"{path}/", f"{path}//", path.replace("/", "///"), f"/%2F/{path}%2F"]


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//"])
async def test_slashes_too_many_change_nothing_of_an_inference_route(tmp_path: Path, path: str) -> None:
    async with cluster(tmp_path, root_path="/x") as house:
        await house.worker(say("hello"), model="org/m")
        for prefix in ("", "/x"):
            answer = await house.client.call("POST", prefix + path, BODY)
            assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "hello")
        assert (await get(house, path)).status == 405


@pytest.mark.parametrize("prefix", ["", "//x", "/x/"])
async def test_slashes_too_many_change_nothing_of_pages_and_lists(tmp_path: Path, prefix: str) -> None:
    async with cluster(tmp_path, root_path="/x") as house:
        await house.worker(say("hello"), model="org/m")
        for path in ("/v1/models", "/docs", "/openapi.json", "/health", "/metrics", "/api/tags", "/inspect/"):
            for spelling in spellings(path):
                assert (await get(house, prefix + spelling)).status == 200, prefix + spelling
        for spelling in ("//v1//models//org/m", "/v1/models/org/m//", "//v1/models///org%2Fm"):
            assert (await get(house, prefix + spelling)).json["id"] == "org/m"
        assert (await get(house, f"{prefix}//v1//models/org/m//")).json["id"] == "org/m"
        assert (await get(house, f"{prefix}//")).status == 200
        assert (await get(house, f"{prefix}//nowhere//")).status == 404


async def test_the_name_of_a_model_keeps_its_slashes(tmp_path: Path) -> None:
    async with cluster(tmp_path, root_path="/x") as house:
        await house.worker(model="/models//m")
        for path in ("/v1/models//models//m", "//x//v1//models//models//m/", "/v1/models/%2Fmodels%2F%2Fm"):
            assert (await get(house, path)).json["id"] == "/models//m", path


async def test_a_prefix_and_slashes_open_no_door(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("good"), key("files", routes=["files"]), root_path="/x") as house:
        await house.worker()
        body = {**BODY, "model": "m"}
        for path in ("/x/v1/chat/completions", "//v1/chat/completions", "/x//v1/chat/completions/"):
            found = [
                (await house.client.call("POST", path, body, headers=headers)).status
                for headers in ({}, bearer("files"), bearer("good"))
            ]
            assert found == [401, 403, 200], path
        assert (await get(house, "/x/busy_threshold", **bearer("good"))).status == 403
        assert (await get(house, "/x/health")).status == 200


def test_a_prefix_is_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_args(["--root-path", "/llm/"], {}).root_path == "/llm"
    assert parse_args([], {"DYN_HTTP_ROOT_PATH": "/a/b"}).root_path == "/a/b"
    for given in ("llm", "//llm", "/a?b", '/"><b'):
        with pytest.raises(SystemExit):
            parse_args(["--root-path", given], {})
        assert "is not the prefix of a path; write for example /llm" in capsys.readouterr().err

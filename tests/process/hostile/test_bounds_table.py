"""Every bound in the table of docs/security.md: its setting is read, it refuses, it says so, and it counts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.http.server import LIMITS
from dynamo.frontend.settings import FrontendSettings
from support.doc_pages import rows
from support.frontend_cluster import Cluster, cluster
from support.patience import PATIENCE_SECONDS
from support.tiny_model import write_tiny_model

TABLE = [[cell.strip("`") for cell in row] for row in rows("security.md", "Bound", "Setting")]
REFERENCES = {"type": "object", "a": {"$ref": "#"}, "b": {"$ref": "#"}}

# Setting: (a tight value, a request just beyond it); None: not a request.
BEYOND: dict[str, tuple[str, dict[str, Any] | None]] = {
    "DYN_HTTP_JSON_MEMBERS_LIMIT": ("64", {"metadata": {f"key{number}": "x" * 2000 for number in range(70)}}),
    "DYN_HTTP_JSON_ITEMS_LIMIT": ("64", {"stop": ["x" * 2000] * 70}),
    "DYN_HTTP_BODY_BYTES_PER_TOKEN": ("1", {"user": "x" * 17_000_000}),
    "DYN_GUIDED_MAX_RULES": ("2", {"guided_grammar": 'start: a\na: b\nb: "x"'}),
    "DYN_GUIDED_MAX_REFERENCES": ("1", {"guided_json": REFERENCES}),
    "DYN_GUIDED_MAX_DEPTH": ("2", {"guided_json": {"a": {"b": {}}}}),
    "DYN_GUIDED_MAX_BRACKETS": ("2", {"guided_regex": "(((a)))"}),
    "DYN_GUIDED_MAX_NODES": ("3", {"guided_choice": ["a", "b", "c", "d"]}),
    "DYN_GUIDED_MAX_CHARACTERS": ("8", {"guided_json": {"const": "x" * 9}}),
    "DYN_GUIDED_MAX_GRAMMAR_CHARACTERS": ("8", {"guided_regex": "x" * 9}),
    "DYN_MAX_MODELS": ("1", None),
}


def value_of(settings: FrontendSettings, variable: str) -> int:
    name = variable.removeprefix("DYN_").removeprefix("HTTP_").lower()
    if name.startswith("guided_max_"):
        return int(getattr(settings.guided, name.removeprefix("guided_max_")))
    return int(getattr(settings, name))


def test_the_table_names_every_bound_that_is_tried_here() -> None:
    assert {row[1] for row in TABLE} == set(BEYOND)
    assert {row[0] for row in TABLE} <= set(LIMITS)


@pytest.mark.parametrize(("limit", "variable", "default"), TABLE, ids=[row[1] for row in TABLE])
async def test_a_bound_is_read_refuses_and_counts(tmp_path: Path, limit: str, variable: str, default: str) -> None:
    tight, beyond = BEYOND[variable]
    assert value_of(FrontendSettings.from_env({}), variable) == int(default)
    settings = FrontendSettings.from_env({variable: tight})
    assert value_of(settings, variable) == int(tight)
    names = [each.name for each in dataclasses.fields(FrontendSettings) if each.name != "model_cache_dir"]
    chosen = {name: getattr(settings, name) for name in names}
    async with cluster(tmp_path, **chosen) as house:
        await house.worker(directory=write_tiny_model(tmp_path / "model"))
        if beyond is None:
            await _one_model_too_many(house)
        else:
            messages = [{"role": "user", "content": "hi"}]
            answer = await house.client.call(
                "POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": messages, **beyond}).encode()
            )
            assert (answer.status, variable in answer.json["message"]) == (400, True), answer.body[:300]
        assert house.metric("dynamo_frontend_refusals_total", limit=limit) == 1
        assert (await house.client.chat("hi")).status == 200


async def _one_model_too_many(house: Cluster) -> None:
    await house.worker(model="another", wait=False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not house.metric("dynamo_frontend_refusals_total", limit="models"):
            await asyncio.sleep(0.01)
    assert not house.frontend.models.is_registered("another")

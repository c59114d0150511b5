"""Where a worker is, as its card says it: from the files of its pod."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.worker import settings
from dynamo.worker.settings import describe_place
from support.cases import each_case
from support.patience import PATIENCE_SECONDS

ON = {"DYN_TOPOLOGY_ENABLED": "true", "DYN_KV_TRANSFER_DOMAIN": "zone"}


def described(record: ModelRuntimeConfig) -> tuple[Any, ...]:
    return (
        record.topology_domains,
        record.kv_transfer_domain,
        record.kv_transfer_enforcement,
        record.kv_transfer_preferred_weight,
    )


@each_case(
    ("env", "expected"),
    [
        ({}, ({}, None, None, None)),
        ({"DYN_KV_TRANSFER_DOMAIN": "zone"}, ({}, None, None, None)),
        (ON, ({"zone": "a", "rack": "r 1"}, "zone", "required", None)),
        ({**ON, "DYN_KV_TRANSFER_PREFERRED_WEIGHT": "0.5"}, ({"zone": "a", "rack": "r 1"}, "zone", "required", None)),
        (
            {**ON, "DYN_KV_TRANSFER_ENFORCEMENT": "preferred", "DYN_KV_TRANSFER_PREFERRED_WEIGHT": "0.5"},
            ({"zone": "a", "rack": "r 1"}, "zone", "preferred", 0.5),
        ),
        # What cannot be read is the stricter rule, and a warning.
        ({**ON, "DYN_KV_TRANSFER_ENFORCEMENT": "soft"}, ({"zone": "a", "rack": "r 1"}, "zone", "required", None)),
    ],
)
async def test_a_worker_says_where_it_is(tmp_path: Path, env: Mapping[str, str], expected: tuple[Any, ...]) -> None:
    for name, content in {"zone": "a\n", "rack": " r 1 ", "empty": " \n", ".hidden": "x"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "directory").mkdir(exist_ok=True)
    record = ModelRuntimeConfig()
    await describe_place(record, {**env, "DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path)})
    assert described(record) == expected


@each_case(
    ("env", "files", "named"),
    [
        ({"DYN_TOPOLOGY_ENABLED": "1"}, {"zone": b"a"}, "DYN_KV_TRANSFER_DOMAIN"),
        (ON, {"rack": b"a"}, "DYN_KV_TRANSFER_DOMAIN=zone"),
        (ON, {"zone": b" "}, "DYN_KV_TRANSFER_DOMAIN=zone"),
        (ON, {"zone": b"\xff\xfe"}, "zone cannot be read"),
        (ON, {"zone": b"a" * 300}, "longer than 253"),
        (ON, {str(number): b"a" for number in range(65)}, "at most 64 domains"),
    ],
)
async def test_a_place_that_cannot_be_known_ends_the_start(
    tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str], files: Mapping[str, bytes], named: str
) -> None:
    directory = tmp_path_factory.mktemp("topology")
    for name, content in files.items():
        (directory / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=named):
        await describe_place(ModelRuntimeConfig(), {**env, "DYN_TOPOLOGY_MOUNT_PATH": str(directory)}, wait_seconds=0.0)


async def test_a_file_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LOOK_SECONDS", 0.001)
    record = ModelRuntimeConfig()
    waiting = asyncio.ensure_future(describe_place(record, {**ON, "DYN_TOPOLOGY_MOUNT_PATH": str(tmp_path / "late")}))
    await asyncio.sleep(0)
    assert not waiting.done()
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "zone").write_text("b")
    await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert described(record) == ({"zone": "b"}, "zone", "required", None)

"""Bodies with a content coding: read within the bounds of any body, or refused by name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.frontend_cluster import Cluster, cluster, say

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
CHAT = "/v1/chat/completions"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, body_limit_bytes=1024 * 1024) as found:
        await found.worker(say("hello"))
        yield found


async def status_of(house: Cluster, body: bytes, coding: str) -> int | None:
    headers = {"content-encoding": coding, "content-type": "application/json"}
    return (await house.client.call("POST", CHAT, body, headers=headers)).status


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("identity", BODY),
    ],
)
async def test_a_compressed_body_is_read(house: Cluster, coding: str, body: bytes) -> None:
    assert await status_of(house, body, coding) == 200


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("br", BODY, 415),
        ("zstd", BODY, 415),
        ("gzip, gzip", BODY, 415),
        ("gzip", BODY, 400),
        ("gzip", gzip.compress(BODY, mtime=0)[:-4], 400),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more", 400),
        ("gzip", gzip.compress(b" " * (2 * 1024 * 1024), mtime=0), 413),
    ],
)
async def test_what_cannot_be_decompressed_is_refused(house: Cluster, coding: str, body: bytes, status: int) -> None:
    assert await status_of(house, body, coding) == status
    assert await status_of(house, gzip.compress(BODY, mtime=0), "gzip") == 200

"""Model files over HTTP between the systems: a worker that serves its own, a frontend that fetches and checks them."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.interop_cluster import IN_RUST, interop_cluster
from support.interop_engine import SENTENCE
from support.native_frontend import why_not

REASON = why_not()
pytestmark = [pytest.mark.interop, pytest.mark.skipif(bool(REASON), reason=REASON)]


@pytest.mark.parametrize(
    ("frontend", "worker"),
    [("ours", "native"), ("native", "ours"), pytest.param("native", "rust", marks=IN_RUST)],
)
async def test_a_frontend_serves_from_files_that_the_worker_serves(frontend: str, worker: str, tmp_path: Path) -> None:
    port = low_port()
    more = {"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SELF_HOST_METADATA": "1"}
    async with interop_cluster(tmp_path, frontend=frontend, workers=[worker], more=more) as cluster:
        places = [urlsplit(path) for path in card_paths(tmp_path / "store")]
        assert len(places) >= 3
        assert {(place.scheme, place.port) for place in places} == {("http", port)}
        reply = await cluster.chat()
        assert reply.json()["choices"][0]["message"]["content"] == SENTENCE


def low_port() -> int:
    """A free port that 1.6.1 can read: its DYN_SYSTEM_PORT is a signed number of 16 bits."""
    for port in range(20_000, 2**15):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port below 32768")


def card_paths(store: Path) -> list[str]:
    """Where the one published card says its model's files are."""
    (record,) = (store / "v1" / "mdc").iterdir()
    card = json.loads(record.read_text())["card_json"]
    artefacts = (file for name in ("model_info", "tokenizer", "prompt_formatter") for file in card[name].values())
    return [(file.get("file") or file)["path"] for file in artefacts]

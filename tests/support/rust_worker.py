"""The sample engine in Rust as a process, for the tests that call it over its own wires."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo.runtime.calls.request_plane.base import Instance
from support.processes import Process, get

ENGINE = os.environ.get("RUST_SAMPLE_ENGINE", "")
TLS_ENGINE = os.environ.get("RUST_TLS_ENGINE", "")
RAW_ENGINE = str(Path(ENGINE).parent / "raw-engine")  # built beside it
NEEDS_ENGINE = pytest.mark.skipif(not ENGINE, reason="no Rust worker: `make test-rust` builds one (RUST_SAMPLE_ENGINE)")


class RustWorker(Process):
    """An engine in Rust, on a store of its own."""

    store = Path()
    environment: Mapping[str, str] = {}

    @classmethod
    def start(
        cls,
        root: Path,
        *flags: str,
        delay: str = "0.001",
        is_raw: bool = False,
        has_tls: bool = False,
        **env: str,
    ) -> RustWorker:
        """Start the sample engine, also as a program that has TLS, or the raw engine of `rust/scripted-engine`."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        own = {
            "DYN_FILE_KV": str(root / "store"),
            "DYN_SYSTEM_PORT": "0",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        }
        argv = [RAW_ENGINE] if is_raw else [TLS_ENGINE if has_tls else ENGINE, "--delay", delay]
        worker = cls("rust", [*argv, *flags], plain | own | env, root / "rust.log")
        worker.store, worker.environment = root / "store", plain | own
        return worker

    def instance(self) -> Instance:
        self.wait_log("Serving ")
        folder = self.store / "v1" / "instances"
        while not (found := [path for path in folder.glob("*") if not path.name.startswith(".tmp_")]):
            assert not self.has_ended, self.log
        record = json.loads(found[0].read_text())
        assert record.pop("type") == "Endpoint"
        return msgspec.convert(record, Instance)

    def records(self) -> list[str]:
        return sorted(path.relative_to(self.store).as_posix() for path in self.store.rglob("*") if path.is_file())

    def get(self, path: str, *, method: str = "GET") -> tuple[int, str]:
        port = int(self.wait_log(r"status server on http://[^:\s]+:(\d+)")[1])
        status, body = get(port, path, method=method)
        return status, body.decode()

    def address(self) -> tuple[str, int]:
        host, _, port = self.instance().transport["tcp"].partition("/")[0].rpartition(":")
        return host, int(port)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        _, page = self.get("/metrics")
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def body(tokens: int, prompt: int = 3) -> dict[str, Any]:
    return {"token_ids": list(range(prompt)), "stop_conditions": {"max_tokens": tokens}}

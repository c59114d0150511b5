"""What an idle worker has loaded: what it does not need it must not pay for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.worker.run import run

async def serving():
    print(json.dumps(sorted(sys.modules)), flush=True)

run(SampleLLMEngine, ["--discovery-backend", "file"], on_serving=serving)
"""

LIBRARIES = {"blake3", "httptools", "msgspec", "typing_extensions", "uvloop", "xxhash", "zmq"}
"""What a worker of the sample engine needs beside the standard library."""

ROOMS = {
    *(
        "common",
        "contract",
        "engines",
        "errors",
        "health_check",
        "kv",
        "llm",
        "logits_processing",
        "placement",
        "protocol",
    ),
    *("runtime", "settings", "text", "worker"),
}
"""Rooms of this package in which a worker has business."""

NOT_NEEDED = {
    *(
        "aiohttp",
        "huggingface_hub",
        "jinja2",
        "kubernetes_asyncio",
        "nats",
        "numpy",
        "opentelemetry",
        "prometheus_client",
    ),
    *("pydantic", "rich", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "xgrammar"),
}


def test_an_idle_worker_has_loaded_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "OTEL_"))}
    own = {"DYN_FILE_KV": str(tmp_path), "DYN_SYSTEM_PORT": "0", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=kept | own, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        loaded = json.loads(worker.stdout.readline())
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    packages = {name.split(".")[0] for name in loaded}
    assert packages & NOT_NEEDED == set()
    foreign = packages - sys.stdlib_module_names - {"dynamo", "__main__", "_distutils_hack", "sitecustomize"}
    assert {
        name for name in foreign if not name.startswith(("_cython_", "cython_", "__editable__", "_virtualenv"))
    } <= LIBRARIES
    rooms = {name.split(".")[1] for name in loaded if name.startswith("dynamo.")}
    assert rooms <= ROOMS, rooms - ROOMS

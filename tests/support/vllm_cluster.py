"""Workers of vLLM behind a frontend, for tests over real processes. `DYNAMO_VLLM_PYTHON` is a Python that has vLLM."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from support.demo_model import FILES
from support.processes import Cluster, Worker

PYTHON: Final = os.environ.get("DYNAMO_VLLM_PYTHON", "")
WHY_NOT: Final = "set DYNAMO_VLLM_PYTHON to a Python that has vLLM and this package (docs/engines.md)"
MODEL: Final = "demo"

# Small, and alike on every machine: float32, no compiler, a cache of 1 GiB.
FLAGS: Final = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32")
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def start_worker(cluster: Cluster, name: str, *flags: str, **env: str) -> Worker:
    """Start a worker; `wait_ready` of it returns when it serves, which takes half a minute or more."""
    argv = [PYTHON, "-m", "dynamo.vllm", "--model", str(FILES), "--served-model-name", MODEL, "--component", MODEL]
    own = [*FLAGS, "--discovery-backend", "file", "--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3"]
    journal = cluster.root / f"{name}.journal"
    return cluster._worker(name, MODEL, [*argv, *own, *flags], ENVIRONMENT | env, journal)


def parts_of(worker: Worker) -> dict[str, int]:
    """The processes of one worker's engine: name -> number."""
    found: dict[str, int] = {}
    parents = [worker.pid]
    while parents:
        parent = parents.pop()
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = entry.read_text()
            except OSError:
                continue
            match = re.match(r"(\d+) \((.*)\) (\S) (\d+) ", text)
            if match is None or int(match[4]) != parent or match[3] == "Z":
                continue
            parents.append(int(match[1]))
            found[_title(int(match[1])) or match[2]] = int(match[1])
    return found


def _title(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""

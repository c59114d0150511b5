"""The registries of an engine in a process of its own: prometheus_client decides at its import where values live."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def in_process(script: str, **env: str) -> str:
    preamble = """
        import os
        class Handle:
            auto_labels = {"worker_id": "1f"}
            def __init__(self): self.callbacks = []
            def register_prometheus_expfmt_callback(self, cb): self.callbacks.append(cb)
        handle = Handle()
        from dynamo.contract.metrics import register_global_registry
        import sys
        assert "prometheus_client" not in sys.modules
    """
    clean = {key: value for key, value in os.environ.items() if key != "PROMETHEUS_MULTIPROC_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(script)],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CALL = """
register_global_registry(handle, engine_prefix="vllm:", multiproc_only_prefixes=["lmcache:"])
print(len(handle.callbacks)); print("".join(cb() for cb in handle.callbacks))
"""


def test_without_child_processes_one_callback_covers_all_prefixes() -> None:
    out = in_process(
        "from prometheus_client import Gauge\nGauge('vllm:a','').set(1)\nGauge('lmcache:b','').set(2)\n"
        "Gauge('other','').set(2)\n" + CALL
    )
    assert out.startswith("1\n")
    assert 'vllm:a{worker_id="1f"} 1.0' in out
    assert 'lmcache:b{worker_id="1f"} 2.0' in out
    assert "other" not in out


def test_the_files_of_children_are_attached_when_nothing_conflicts(tmp_path: Path) -> None:
    child = "from prometheus_client import Counter; Counter('vllm:child','').inc(4)"
    subprocess.run(
        [sys.executable, "-c", child], env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}, check=True
    )
    out = in_process(CALL, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert out.startswith("1\n")
    assert 'vllm:child_total{worker_id="1f"} 4.0' in out


CONFLICT = """
from prometheus_client import Counter
Counter("vllm:own", "").inc(1)
Counter("lmcache:own", "").inc(2)
"""


def test_a_conflict_splits_engine_and_files_without_doubling(tmp_path: Path) -> None:
    out = in_process(CONFLICT + CALL, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert out.startswith("2\n")
    assert out.count("vllm:own_total{") == 1
    assert out.count("lmcache:own_total{") == 1


def test_a_conflict_without_file_prefixes_is_one_callback(tmp_path: Path) -> None:
    call = CALL.replace(', multiproc_only_prefixes=["lmcache:"]', "")
    out = in_process(CONFLICT + call, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert out.startswith("1\n")

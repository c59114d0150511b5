"""What the rooms of the runtime, the contract and the commands load: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import dynamo
import dynamo._core
import dynamo.llm


def test_the_runtime_leaves_prometheus_client_to_the_engine() -> None:
    # The library decides at import between memory and PROMETHEUS_MULTIPROC_DIR, which engines set in start().
    modules = (
        "dynamo.runtime.observe.metrics, dynamo.runtime.http.status_server, dynamo.contract.metrics, "
        "dynamo.worker.lifecycle_metrics, dynamo.runtime.calls.health"
    )
    script = f"import sys, {modules}; sys.exit('prometheus_client' in sys.modules or 'opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_tables_import_nothing_that_only_one_plane_needs() -> None:
    code = "import sys, dynamo.runtime.distributed; print(*sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "dynamo.runtime.planes" in found
    lazy = ("zmq", "nats", "aiohttp", "kubernetes_asyncio", "dynamo.runtime.calls.request_plane.listener")
    assert not [name for name in found if name in lazy or name.startswith("dynamo.runtime.calls.request_plane.native")]


def test_importing_the_contract_loads_neither_prometheus_nor_a_server() -> None:
    code = (
        "import sys; from dynamo.common.backend import LLMEngine, EngineConfig, WorkerConfig; "
        "import dynamo.common.backend.metrics; "
        "print([m for m in ('prometheus_client', 'uvicorn', 'torch', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_an_engine_does_not_load_the_router() -> None:
    code = "import sys, dynamo.llm, dynamo._core; print([each for each in sys.modules if each.startswith('dynamo.router')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
    for name in ("KvRouter", "KvRouterConfig", "KvIndexer", "ApproxKvIndexer", "RouterConfig"):
        assert getattr(dynamo.llm, name) is getattr(dynamo._core, name)
        assert name in dynamo.llm.__all__


def test_help_imports_nothing_heavy() -> None:
    heavy = ("asyncio", "argparse", "rich", "msgspec", "dynamo.runtime", "dynamo.frontend", "dynamo.common")
    program = (
        "import sys; from dynamo.cli.main import main; main(['--help']); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "usage: dynamo COMMAND" in shown
    assert shown.rstrip().endswith("['argparse']"), "argparse is what error lines need; nothing else belongs here"


def test_the_parent_of_the_processes_imports_neither_runtime_nor_frontend() -> None:
    program = "import sys; import dynamo.cli.serve, dynamo.cli.local; print([m for m in sys.modules if m.startswith('dynamo.')])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    # These load nothing of ours.
    modules = ("", ".base", ".base.addresses", ".base.forever", ".base.tasks", ".observe", ".observe.log_text")
    light = {f"dynamo.runtime{part}" for part in modules}
    loaded = set(eval(shown)) - light
    assert {name.split(".")[1] for name in loaded} == {"cli", "errors", "scaling", "settings", "supervise"}

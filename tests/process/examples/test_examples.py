"""Every example runs: workers and a frontend as processes, the client against them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.contract.conformance import run_conformance
from support.processes import Cluster, Frontend, Process

EXAMPLES = Path(__file__).parents[3] / "examples"
TESTED = {
    *("any_callable.py", "block_diffusion_engine.py", "echo_engine.py", "lower_level_worker.py", "chat_client.py"),
    "node-backend",
    "policies",
}
# policies in tests/unit/policies, node-backend, any_callable.py and block_diffusion_engine.py in tests of their own


class Examples(Cluster):
    """The example workers on the cluster's store."""

    def python(self, name: str, script: str, *flags: str, **env: str) -> Process:
        return self._start(Process, name, [sys.executable, str(EXAMPLES / script), *flags], env)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Frontend, Process, Process]]:
    with Examples(tmp_path_factory.mktemp("examples")) as running:
        echo = running.python("echo", "echo_engine.py", "--model-name", "echo", "--discovery-backend", "file")
        lower = running.python("lower", "lower_level_worker.py", "lower-level", DYN_DISCOVERY_BACKEND="file")
        frontend = running.frontend("frontend")
        frontend.wait_ready()
        for model in ("echo", "lower-level"):
            frontend.wait_log(f"model {model} is served")
        yield frontend, echo, lower
        for process in (echo, lower, frontend):
            process.terminate()
        assert [process.exit_code() for process in (echo, lower, frontend)] == [0, 0, 0]
        left = [path for path in (running.root / "store").rglob("*") if path.is_file()]
        assert left == []


def ask(frontend: Frontend, *arguments: str) -> str:
    argv = [sys.executable, str(EXAMPLES / "chat_client.py"), f"{frontend.url}/v1", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_echo_engine_says_the_prompt_and_stops(cluster: tuple[Frontend, Process, Process]) -> None:
    answer = ask(cluster[0], "Hello!", "echo")
    prompt, counted = answer.rsplit("\n[", 1)
    assert "Hello!" in prompt
    length = len(prompt)  # one token is one byte here
    assert counted == f"echo: {length} + {length} tokens]\n"


def test_the_lower_level_worker_counts_to_the_limit(cluster: tuple[Frontend, Process, Process]) -> None:
    answer = ask(cluster[0], "Count!", "lower-level")
    assert re.fullmatch(r"12345678901234567890123456789012\n\[lower-level: \d+ \+ 32 tokens\]\n", answer)


def test_the_client_takes_the_first_model_when_it_is_told_none(cluster: tuple[Frontend, Process, Process]) -> None:
    listed = json.loads(cluster[0].get("/v1/models")[1])["data"]
    assert f"[{listed[0]['id']}: " in ask(cluster[0], "Hello!")


async def test_the_echo_engine_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from echo_engine import EchoEngine

    await run_conformance(lambda: EchoEngine("echo", 0.0))


def test_no_example_is_left_without_a_test() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"} == TESTED


def test_every_example_begins_by_saying_how_to_run_it() -> None:
    for path in EXAMPLES.glob("*.py"):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert f"python examples/{path.name}" in said

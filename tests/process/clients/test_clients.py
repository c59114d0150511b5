"""Client libraries that people use, unchanged, each in an environment of its own: `make test-clients` makes these."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import CLIENTS, FOLDER, python_of

from support.patience import PATIENCE_SECONDS
from support.serve_command import serve_command

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("served")
    with serve_command(directory, "--http-host", "127.0.0.1", "--http-port", "0", "--in-process") as command:
        command.wait_ready()
        yield command.url


@pytest.mark.clients
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_library_works_unchanged(name: str, url: str) -> None:
    python = python_of(name)
    if not python.exists():
        pytest.skip(f"{FOLDER.name}/{name} is missing: `make test-clients` makes it, and says why when it cannot")
    done = subprocess.run(
        [python, HERE / f"{name}_calls.py", url],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"

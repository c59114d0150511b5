"""What the tests of `make test-foreign` have in common: an environment of a suite, and the demonstration model served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from client_environments import FOLDER, python_of

from support.serve_command import serve_command


def interpreter(name: str) -> Path:
    """Return the Python of a suite's environment; skip the test where there is none."""
    python = python_of(name)
    if not python.exists():
        pytest.skip(f"{FOLDER.name}/{name} is missing: `make test-foreign` makes it, and prints why when it cannot")
    return python


def package(name: str, module: str) -> Path:
    """Return the folder of a package in a suite's environment, which is only read."""
    (found,) = interpreter(name).parents[1].glob(f"lib/python3*/site-packages/{module}")
    return found


@contextmanager
def served_demo(directory: Path, *, names: Sequence[str] = ("demo",)) -> Iterator[str]:
    """Serve the demonstration model by these names; yield the address."""
    flags = ["--http-host", "127.0.0.1", "--http-port", "0", "--in-process", "--served-model-name", ",".join(names)]
    with serve_command(directory, *flags) as command:
        command.wait_ready()
        yield command.url

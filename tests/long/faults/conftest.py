"""What the scenarios share: an etcd of their own, and a way to print what they measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd_server import EtcdServer
from support.scenario_table import Say


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print a figure past pytest."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", flush=True)

    return show


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """Run an etcd for one test."""
    with EtcdServer(tmp_path / "etcd") as server:
        yield server

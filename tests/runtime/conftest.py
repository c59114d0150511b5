"""Services that the runtime's tests share, started when the first test asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.etcd_server import EtcdServer


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd; tests may do anything to it that leaves it answering."""
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "member") as server:
        yield server

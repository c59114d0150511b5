"""One small cluster of real processes, shared by every end-to-end test of a session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from support.processes import Cluster, Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Cluster(tmp_path_factory.mktemp("e2e")) as cluster:
        # No quarantine: an engine error of one test must not close the model for the next one.
        # No wait for a replacement: the errors of a model's only worker are what many tests are about.
        frontend = cluster.frontend("frontend", DYN_RUNTIME_INHIBITED_DURATION_SECS="0", DYN_REPLACEMENT_WAIT_SECS="0")
        scripted = cluster.worker("scripted", "scripted")
        narrow = cluster.worker("narrow", "narrow", DYN_ENGINE_REQUEST_LIMIT="1", DYN_DYNAMO_REQUEST_QUEUE_LIMIT="1")
        cluster.wait_ready(frontend, scripted, narrow)
        yield Stack(cluster, frontend, scripted, narrow)


@pytest.fixture
def tag() -> str:
    """Marks the requests of one test in the engines' journals."""
    return uuid.uuid4().hex


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Unique to the test: for processes and models of its own."""
    return f"{request.node.originalname.removeprefix('test_')[:24]}-{uuid.uuid4().hex[:6]}"

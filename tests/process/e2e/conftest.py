"""One small cluster of real processes, shared by every end-to-end test of a session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import RUST_ENGINE, Cluster, Stack

NOT_IN_RUST = {
    "test_an_engine_that_yields_rubbish_harms_only_its_own_stream": "chunks have a type in Rust",
    "test_a_nats_that_dies_under_load_costs_no_request_and_the_router_catches_up": "that sample has no KV events",
    "test_unknown_keys_of_a_chunk_are_nobodys_business": "chunks have a type in Rust",
}
"""Tests that the workers in Rust are not meant to pass, and why."""
NOT_FOR_RUST = frozenset(
    {"blocked_loop", "chaos", "drain", "kubernetes", "tls"}
)  # files about parts that only Python workers have


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not RUST_ENGINE:
        return
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        reason = NOT_IN_RUST.get(getattr(item, "originalname", item.name))
        if item.path.stem.removeprefix("test_e2e_") in NOT_FOR_RUST:
            reason = "about a part that only Python workers have"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"workers in Rust: {reason}"))


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

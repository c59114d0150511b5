"""What all tests share: repeatable examples, and which tests start processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples at every run, so that a red build is red for everybody. `HYPOTHESIS_PROFILE=explore` (or
# --hypothesis-profile) looks further; what it finds becomes an @example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile("repeatable")

# Tests below these paths start processes, real servers or whole simulated clusters, or wait for timers of real time: the
# marker `process`. `make test` runs all others, in about a minute; `make test-all` runs these.
PROCESS_TESTS = (
    "backend/test_failure_matrix.py",
    "backend/test_idle_worker.py",
    "backend/test_typed_authoring.py",
    "cli/test_bench.py",
    "cli/test_chat.py",
    "cli/test_demo_served.py",
    "cli/test_new_package.py",
    "cli/test_rolling_restart.py",
    "cli/test_serve_config.py",
    "cli/test_serve_processes.py",
    "cli/test_supervision.py",
    "deploy/test_compose_processes.py",
    "docs/test_commands.py",
    "docs/test_fresh_clone.py",
    "e2e",
    "examples",
    "faults",
    "hostile",
    "interop",
    "reference/test_demo_answers.py",
    "reference/test_demo_lessons.py",
    "reference/test_demo_training.py",
    "reference/test_disaggregated_processes.py",
    "reference/test_guided_hostility.py",
    "reference/test_kv_transfer.py",
    "reference/test_reference_core.py",
    "reference/test_reference_served.py",
    "runtime/test_discovery_etcd.py",
    "runtime/test_event_plane_contract.py",
    "runtime/test_event_plane_hardship.py",
    "runtime/test_nats_requests.py",
    "simulation",
)
# Single tests of the same kind: they compute for seconds. By function; all parameters of it.
LONG_TESTS = frozenset(
    {
        "test_a_slug_is_its_own_slug",
        "test_an_answer_is_the_same_alone_and_after_giving_way",
        "test_every_answer_has_the_form_that_was_asked_for",
        "test_a_structural_tag_shapes_the_answer",
        "test_what_a_closed_schema_admits_the_clients_schema_admits",
        "test_a_stream_leaves_nothing_to_the_collector",
        "test_the_settings_page_lists_exactly_the_variables_that_are_read",
        "test_no_life_of_sequences_leaks_a_block_exceeds_a_budget_or_loses_a_token",
        "test_a_request_that_fails_or_whose_client_leaves_gives_its_place_back",
        "test_what_cannot_be_reached_is_said_before_the_engine_starts",
    }
)
_HERE = Path(__file__).parent


def _starts_processes(path: Path) -> bool:
    name = path.relative_to(_HERE).as_posix()
    return any(name == one or name.startswith(f"{one}/") for one in PROCESS_TESTS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out that the marker expression would deselect as a whole: collecting ten thousand tests takes its time."""
    if collection_path.is_file() and config.option.markexpr == "not process" and _starts_processes(collection_path):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_processes(item.path) or getattr(item, "originalname", item.name) in LONG_TESTS:
            item.add_marker(pytest.mark.process)

"""What all tests share: repeatable examples, and the markers that part `make test` from `make test-all`."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from dynamo.runtime.observe.known_failures import LOGGED
from support.forked_run import ForkedRun

# The same examples at every run, so that a red build is red for everybody. `HYPOTHESIS_PROFILE=explore` (or
# --hypothesis-profile) looks further; what it finds becomes an @example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("quick", max_examples=10, derandomize=True, deadline=None)  # make test
settings.register_profile("thorough", max_examples=40, derandomize=True, deadline=None)  # make test-all
settings.register_profile("explore", max_examples=2000, deadline=None)
# Else Hypothesis puts constants of all modules of ours that happen to be loaded among its examples: not the same in every
# process, and 700 files to parse in each.
providers._get_local_constants = lambda: providers._local_constants
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

SLOW_FOLDERS = frozenset({"process", "long"})
_HERE = Path(__file__).parent

gc.disable()  # until everything is collected: a quarter of a million objects that all stay


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--forks", type=int, default=0, help="run the tests in this many processes that are forked after the collection"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have frontends write the tokens of their inspectors into a folder that goes with the tests, and no proxy between them.

    Clients of others, as that of Kubernetes, take a proxy from the environment also for servers of this machine.
    """
    folder = tempfile.TemporaryDirectory(prefix="tests-runtime-")
    if config.getoption("--forks") > 1:
        config.pluginmanager.register(ForkedRun(config.getoption("--forks")))
    os.environ["XDG_RUNTIME_DIR"] = folder.name  # also of the processes that tests start
    # Other programs of a busy machine may hold any test for seconds; that is one line more in its log.
    os.environ["DYN_LOOP_BLOCK_THRESHOLD_SECS"] = "60"
    config.add_cleanup(folder.cleanup)
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


def pytest_collection_finish() -> None:
    """Take the modules and the tests out of every later collection; some tests ask for one, and it looks at all there is."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # as it is, 5 % of the time of all tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(_HERE).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.process)
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)


@pytest.fixture(autouse=True)
def _new_log() -> None:
    """Have each test log its failures whole, whatever tests before it logged."""
    LOGGED.forget()

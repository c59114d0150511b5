"""schemathesis over the document of the listener of operators: what it says of the inspector is what happens.

A short seeded run belongs to the suite; `make test-fuzz` runs the same for longer, with random seeds.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[dev]'")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dynamo.frontend.http.server import HttpServer  # noqa: E402
from support.frontend_cluster import cluster, fail  # noqa: E402
from support.own_thread import on_own_thread  # noqa: E402
from support.patience import PATIENCE_SECONDS  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    "GET /admin/v1/snapshot",
    "GET /admin/v1/requests/{id}",
    "GET /admin/v1/recent",
    "GET /admin/v1/errors",
    "GET /admin/v1/errors/{id}",
    "GET /admin/v1/routing/recent",
    "GET /admin/v1/events",
    "GET /admin/v1/config",
    "POST /admin/v1/requests/{id}/abort",
    "POST /admin/v1/requests/abort",
    "POST /admin/v1/routing/explain",
    "POST /admin/v1/workers/{id}/drain",
    "POST /admin/v1/workers/{id}/quarantine",
    "POST /admin/v1/workers/{id}/undrain",
]
ENDLESS = ["GET /admin/v1/watch"]
GOOD: dict[str, dict[str, Any]] = {
    "POST /admin/v1/requests/abort": {"filter": "model:m", "dry_run": True},
    "POST /admin/v1/routing/explain": {"model": "m", "prompt": "hi"},
}


@dataclass
class Fuzzed:
    """A frontend whose inspector has something to show."""

    url: str
    token: str
    ids: dict[str, list[str]]  # of what is there, by the path below which they stand

    @functools.cached_property
    def operations(self) -> dict[str, Any]:
        """The operations of the document by their labels: it is read once."""
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json")
        return {found.ok().label: found.ok() for found in schema.get_all_operations()}


@asynccontextmanager
async def inspected(directory: Path) -> AsyncIterator[Fuzzed]:
    async with cluster(directory, http_host="127.0.0.1", http_port=0, admin_port=0) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            worker = await house.worker(fail(RuntimeError("it broke")))
            failed = await house.client.chat()
            worker.script = worker.hold
            for number in range(8):
                house.client.begin_chat(headers={"x-request-id": f"mine-{number}"})
            await worker.started.wait()
            inspector = house.frontend.parts["inspector"].inspector
            assert inspector is not None
            inspector.actions.rate.take = lambda: True
            (ended,) = inspector.tables.recent.ended()
            assert (failed.status, ended.status) == (500, 500)
            ids = {
                "requests": [ended.exchange_id, *[f"mine-{number}" for number in range(8)]],
                "errors": [ended.exchange_id],
                "workers": [f"{worker.endpoint.connection_id():x}"],
            }
            yield Fuzzed(f"http://127.0.0.1:{server.admin_port}", inspector.token, ids)
        finally:
            await server.close()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with on_own_thread(inspected(tmp_path_factory.mktemp("fuzz"))) as found:
        yield found


def fuzz(fuzzed: Fuzzed, label: str, mode: Any, examples: int, *, derandomize: bool) -> Counter[int]:
    """Run `examples` cases against one operation; the statuses. Raises with a curl line for a broken promise."""
    operation = fuzzed.operations[label]
    statuses: Counter[int] = Counter()
    known = fuzzed.ids.get(label.split("/")[3], [])

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        number = statuses.total()
        if isinstance(case.body, dict) and number % 2 and label in GOOD:
            case.body = GOOD[label]
        if case.path_parameters and known and (number % 3 or "%0A" in case.path_parameters["id"]):
            # (no route has a line break in its path: that is a 404, with a key or without)
            case.path_parameters["id"] = known[number % len(known)]
        for header in [name for name in case.headers or () if name.lower() == "authorization"]:
            del case.headers[header]  # generated, because the document says that the token travels there
        nobody = case.call(base_url=fuzzed.url, timeout=PATIENCE_SECONDS)
        assert nobody.status_code == 401, nobody.text
        case.validate_response(nobody, checks=CHECKS)
        token = {"authorization": f"Bearer {fuzzed.token}"}
        response = case.call(base_url=fuzzed.url, headers=token, timeout=PATIENCE_SECONDS)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code == 503, (response.status_code, response.text)
        case.validate_response(response, checks=CHECKS)

    check()
    print(f"{label} {mode.value}: {dict(statuses)}")
    return statuses


def all_modes(fuzzed: Fuzzed, label: str, examples: int, *, derandomize: bool) -> Counter[int]:
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if "POST" in label else [])]
    return sum((fuzz(fuzzed, label, mode, examples, derandomize=derandomize) for mode in modes), Counter[int]())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_that_the_document_describes(fuzzed: Fuzzed, label: str) -> None:
    statuses = all_modes(fuzzed, label, 12, derandomize=True)
    assert any(status < 300 for status in statuses), statuses


@pytest.mark.fuzz
@pytest.mark.skipif(not EXAMPLES, reason="make test-fuzz")
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_that_the_document_describes_at_length(fuzzed: Fuzzed, label: str) -> None:
    assert all_modes(fuzzed, label, EXAMPLES, derandomize=False).total() > 0


def test_every_operation_of_the_document_is_fuzzed_but_the_endless_one(fuzzed: Fuzzed) -> None:
    assert sorted(fuzzed.operations) == sorted([*OPERATIONS, *ENDLESS])

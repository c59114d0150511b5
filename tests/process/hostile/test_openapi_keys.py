"""schemathesis over a live frontend behind keys: no key, a key without the right, a good one; and no secret anywhere.

A short seeded run belongs to the suite; `make test-fuzz` runs the same for longer, with random seeds.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[dev]'")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dynamo.frontend.http.server import HttpServer  # noqa: E402
from dynamo.protocol.model_types import ModelType  # noqa: E402
from dynamo.runtime.calls.context import Context  # noqa: E402
from dynamo.runtime.calls.request_plane.base import ResponseSink  # noqa: E402
from support.access import bearer, closed_cluster, key, secret_of  # noqa: E402
from support.frontend_cluster import say  # noqa: E402
from support.own_thread import on_own_thread  # noqa: E402
from support.patience import PATIENCE_SECONDS  # noqa: E402

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
KEYS = (key("good"), key("chats", routes=["inference"]), key("files", routes=["files"]), key("boss", role="admin"))
OPEN = {"GET /health", "GET /live", "GET /ready", "GET /ping", "POST /ping", "GET /version"}
ANY_KEY = {
    *("GET /v1/models", "GET /v1/models/{id}", "GET /v1/models/{id}/ready"),
    *("GET /api/tags", "GET /api/ps", "GET /api/version", "POST /api/show"),
}
SECRET = secret_of("x").partition(".")[2]


async def vectors(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    sink.send_object({"data": {"embeddings": [[0.5] * (body.get("dimensions") or 3) for _ in body["token_ids"]]}})
    sink.end()


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[str]:
    """A frontend behind keys with two workers."""
    where: dict[str, Any] = {"http_host": "127.0.0.1", "http_port": 0, "files_dir": directory / "files"}
    logs: dict[str, Any] = {"access_log": str(directory / "access.log"), "audit_log": str(directory / "audit.log")}
    async with closed_cluster(directory, *KEYS, peek_seconds=0.2, **where, **logs) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            await house.worker(say("hello"))
            kinds = ModelType.Classify | ModelType.Pooling | ModelType.Rerank | ModelType.Embedding
            await house.worker(vectors, model="vectors", model_type=kinds)
            yield f"http://127.0.0.1:{server.port}"
        finally:
            await server.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("fuzz")
    with on_own_thread(served(directory)) as found:
        yield found
    written = b"".join([path.read_bytes() for path in directory.rglob("*") if path.is_file()])
    assert b'"key_id":"good"' in written.replace(b" ", b"")
    assert SECRET.encode() not in written


def without_right(label: str) -> str:
    """The id of a key that may not use an operation."""
    return "chats" if "/v1/files" in label or "/metrics" in label or "/v1/batches" in label else "files"


def check_operation(address: str, operation: Any, examples: int, *, derandomize: bool) -> Counter[str]:
    """Send generated requests of one operation with each kind of key; the statuses. Raises for a broken promise."""
    label = operation.label
    good = "boss" if label == "GET /metrics" else "good"
    found: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body and found.total() % 2:
            case.body["model"] = "vectors" if "embed" in label else "m"
        for header in [name for name in case.headers or () if name.lower() in ("authorization", "x-api-key")]:
            del case.headers[header]  # generated, because the document says that keys travel there
        for kind, headers in (
            ("none", {}),
            ("wrong", {"authorization": f"Bearer dyn-good.{'A' * 43}"}),
            ("weak", bearer(without_right(label))),
            ("good", bearer(good)),
        ):
            response = case.call(base_url=address, headers=headers, timeout=PATIENCE_SECONDS)
            status = response.status_code
            found[f"{kind} {status}"] += 1
            where = (label, kind, status, response.text[:500])
            assert SECRET not in response.text + str(response.headers), where
            assert response.headers["x-request-id"], where
            if label in OPEN:
                assert status == 200, where
            elif kind in ("none", "wrong"):
                assert status == 401, where
                assert response.headers["www-authenticate"] == ["Bearer"], where
            elif kind == "weak" and label not in ANY_KEY:
                assert status == 403, where
            else:
                assert status not in (401, 403), where
                assert status < 500 or status == 503, where
            case.validate_response(response, checks=CHECKS)

    check()
    return found


def operations(address: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json", headers=bearer("good"))
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.filterwarnings("ignore")
def test_every_operation_with_each_kind_of_key(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen = [check_operation(address, operation, 4, derandomize=True) for operation in operations(address)]
    assert len(seen) >= 30
    assert all(each.total() for each in seen)
    assert SECRET not in caplog.text


@pytest.mark.fuzz
@pytest.mark.skipif(not EXAMPLES, reason="make test-fuzz")
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
def test_every_operation_with_each_kind_of_key_at_length(address: str) -> None:
    for operation in operations(address):
        print(operation.label, dict(check_operation(address, operation, EXAMPLES // 4, derandomize=False)))

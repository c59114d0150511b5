"""schemathesis over `/openapi.json` of a live frontend: what the document says is what happens.

A short seeded run belongs to the suite; `make test-fuzz` runs the same for much longer, with random seeds.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
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

from dynamo.contract.engine import RawEngine  # noqa: E402
from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine  # noqa: E402
from dynamo.engines.sample.speech_engine import SampleSpeechEngine  # noqa: E402
from dynamo.engines.sample.tones import Tones, wav_header  # noqa: E402
from dynamo.engines.sample.transcription_engine import SampleTranscriptionEngine  # noqa: E402
from dynamo.frontend.http.server import HttpServer  # noqa: E402
from dynamo.protocol.model_types import ModelInput, ModelType  # noqa: E402
from dynamo.runtime.calls.context import Context  # noqa: E402
from dynamo.runtime.calls.request_plane.base import ResponseSink  # noqa: E402
from dynamo.worker.serving import RawServing  # noqa: E402
from support.frontend_cluster import Script, cluster  # noqa: E402
from support.own_thread import on_own_thread  # noqa: E402
from support.patience import PATIENCE_SECONDS  # noqa: E402
from support.pictures import RED, data_url  # noqa: E402
from support.scenario_table import record  # noqa: E402

TONES = Tones("nova", 4).opening() + Tones("nova", 4).of("a fox")
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
SAID = data_url(wav_header(len(TONES)) + TONES, "audio/wav")
GOOD: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "POST /v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 4},
    "POST /v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 4},
    "POST /v1/responses/input_tokens": {"model": "m", "input": "hi"},
    "POST /v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "POST /v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "POST /v1/embeddings": {"model": "vectors", "input": "hi"},
    "POST /v1/classify": {"model": "vectors", "input": "hi"},
    "POST /v1/pooling": {"model": "vectors", "input": "hi"},
    "POST /v1/score": {"model": "vectors", "text_1": "hi", "text_2": "ho"},
    "POST /v1/rerank": {"model": "vectors", "query": "hi", "documents": ["a", "b"]},
    "POST /v2/rerank": {"model": "vectors", "query": "hi", "documents": ["a", "b"]},
    "POST /api/chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 4}},
    "POST /api/generate": {"model": "m", "prompt": "hi", "options": {"num_predict": 4}},
    "POST /api/embed": {"model": "vectors", "input": "hi"},
    "POST /api/show": {"model": "m"},
    "POST /tokenize": {"model": "m", "prompt": "hi"},
    "POST /detokenize": {"model": "m", "tokens": [104, 105]},
    "POST /v1/images/generations": {"model": "images", "prompt": "a fox", "size": "16x16"},
    "POST /v1/images/edits": {"model": "images", "prompt": "a fox", "input_reference": data_url(RED)},
    "POST /v1/audio/speech": {"model": "speech", "input": "a fox", "response_format": "wav"},
    "POST /v1/audio/transcriptions": {"model": "ears", "file": SAID},
    "POST /v1/audio/translations": {"model": "ears", "file": SAID},
    "POST /v1/batches": {"input_file_id": "file-none", "endpoint": "/v1/embeddings", "completion_window": "24h"},
}
OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses/input_tokens",
    "POST /v1/embeddings",
    "POST /v1/classify",
    "POST /v1/pooling",
    "POST /v1/score",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/embed",
    "POST /api/show",
    "GET /api/tags",
    "GET /api/ps",
    "GET /api/version",
    "POST /tokenize",
    "POST /detokenize",
    "POST /v1/images/generations",
    "POST /v1/images/edits",
    "POST /v1/audio/speech",
    "POST /v1/audio/transcriptions",
    "POST /v1/audio/translations",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "DELETE /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "POST /v1/videos",
    "GET /v1/videos",
    "GET /v1/videos/{video_id}",
    "DELETE /v1/videos/{video_id}",
    "POST /v1/batches",
    "GET /v1/batches",
    "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/models",
    "GET /v1/models/{id}",
    "GET /v1/models/{id}/ready",
    "GET /health",
    "GET /live",
    "GET /metrics",
    "GET /ping",
    "POST /ping",
    "GET /ready",
    "GET /version",
]  # schemathesis leaves the document itself out


async def echo(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    for token in list(b"hello"):
        sink.send_tokens([token])
        await asyncio.sleep(0)
    sink.send_tokens([], finish_reason="stop")


async def vectors(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
    size = body.get("dimensions") or 3
    sink.send_object({"data": {"embeddings": [[0.5] * size for _ in body["token_ids"]]}})
    sink.end()


def raw(engine: RawEngine) -> Script:
    async def serve(body: Mapping[str, Any], context: Context, sink: ResponseSink) -> None:
        await RawServing(engine).handle(dict(body), context, sink)

    return serve


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[str]:
    """A frontend with a worker of each kind."""
    files = directory / "files"
    async with cluster(directory, http_host="127.0.0.1", http_port=0, peek_seconds=0.2, files_dir=files) as house:
        server = HttpServer(house.frontend)
        await server.start()
        try:
            await house.worker(echo)
            kinds = ModelType.Classify | ModelType.Pooling | ModelType.Rerank | ModelType.Embedding
            await house.worker(vectors, model="vectors", model_type=kinds)
            for name, engine, kind in (
                ("images", SampleDiffusionEngine(delay=0), ModelType.Images),
                ("speech", SampleSpeechEngine(delay=0), ModelType.Audios),
                ("ears", SampleTranscriptionEngine(delay=0), ModelType.Audios),
            ):
                await house.worker(
                    raw(engine), model=name, component=name, model_type=kind, model_input=ModelInput.Text
                )
            yield f"http://127.0.0.1:{server.port}"
        finally:
            await server.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with on_own_thread(served(tmp_path_factory.mktemp("fuzz"))) as found:
        yield found


def within_reach(body: dict[str, Any], good: dict[str, Any], number: int, *, few: bool) -> dict[str, Any]:
    """A generated body that gets further than "no such model"; with `few` of its fields it has a chance to be served."""
    if not few:
        return {**body, "model": good["model"]} if "model" in good else body
    return {**{name: body[name] for name in sorted(body, key=lambda name: (len(name) * number) % 17)[:2]}, **good}


@functools.cache
def operations(address: str) -> dict[str, Any]:
    """The operations of the document by their labels: it is read once."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def fuzz(address: str, label: str, mode: Any, examples: int, *, derandomize: bool) -> Counter[int]:
    """Run `examples` cases against one operation; the statuses. Raises with a curl line for a broken promise."""
    operation = operations(address)[label]
    statuses: Counter[int] = Counter()
    good = GOOD.get(label, {})

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
        if isinstance(case.body, dict) and number % 3:
            case.body = within_reach(case.body, good, number, few=number % 3 == 2)
        response = case.call(base_url=address, timeout=PATIENCE_SECONDS)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code == 503, (response.status_code, response.text)
        case.validate_response(response, checks=CHECKS)

    check()
    print(f"{label} {mode.value}: {dict(statuses)}")
    return statuses


def modes(label: str) -> list[Any]:
    has_body = "POST" in label and label not in ("POST /ping", "POST /v1/batches/{batch_id}/cancel")
    return [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if has_body else [GenerationMode.POSITIVE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_that_the_document_describes(address: str, label: str) -> None:
    for mode in modes(label):
        assert fuzz(address, label, mode, 30 if "POST" in label else 5, derandomize=True).total() > 0


@pytest.mark.fuzz
@pytest.mark.skipif(not EXAMPLES, reason="make test-fuzz")
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_one_that_the_document_describes_at_length(address: str, label: str) -> None:
    statuses: Counter[int] = Counter()
    for mode in modes(label):
        found = fuzz(address, label, mode, EXAMPLES, derandomize=False)
        assert found.total() > 0
        statuses += found
    # Only runs without a crash, a hang or an undescribed answer come so far.
    told = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    record(f"R19 fuzz of {label}", sent=statuses.total(), note=f"every answer as the document describes it: {told}")


def test_every_operation_of_the_document_is_fuzzed(address: str) -> None:
    assert sorted(operations(address)) == sorted(OPERATIONS)

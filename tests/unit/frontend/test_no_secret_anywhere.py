"""With every log, recording, trace and file switched on: what a client sent as its key is in none of them."""

from __future__ import annotations

import asyncio
import gzip
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynamo.frontend.base.settings.recording import RecordingSettings, RequestTraceSettings
from support.access import bearer, closed_cluster, key, secret_of
from support.batch_client import FORM_HEADERS, chat_line, form, jsonl
from support.frontend_cluster import fail, say
from support.patience import PATIENCE_SECONDS
from support.spans import exported  # noqa: F401 - a fixture

UNKNOWN = "sk-nobody-knows-this-key"
CARRIERS = ("authorization", "x-api-key")


def presented(secret: str, carrier: str) -> dict[str, str]:
    return {carrier: f"Bearer {secret}" if carrier == "authorization" else secret}


def contents(directory: Path) -> dict[str, str]:
    """What all files below a directory hold, unpacked, by their names."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            found[path.name] = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("latin-1")
    return found


async def test_a_key_is_in_no_file_recording_span_log_metric_page_or_error(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    exported: InMemorySpanExporter,  # noqa: F811
) -> None:
    caplog.set_level(logging.DEBUG)
    records = (
        key("good"),
        key("dead", enabled=False),
        key("few", limits={"requests_per_day": 1}),
        key("boss", role="admin"),
    )
    trace = RequestTraceSettings(
        is_on=True,
        records=("request_end", "request_stream", "request_payload"),
        path=str(tmp_path / "trace"),
        headers=(*CARRIERS, "x-note"),
    )
    settings: dict[str, Any] = {
        "request_trace": trace,
        "recording": RecordingSettings(keep_failed_content=True),
        "files_dir": tmp_path / "files",
        "usage_db": str(tmp_path / "usage.sqlite"),
        "access_log": str(tmp_path / "access.log"),
        "audit_log": str(tmp_path / "audit.log"),
        "responses_store": f"sqlite:{tmp_path / 'responses.sqlite'}",
        "cors_origins": ("https://app.example",),
    }
    secrets = [secret_of(record.id) for record in records] + [UNKNOWN]
    seen: list[str] = []
    async with closed_cluster(tmp_path, *records, **settings) as found:
        client, worker = found.client, await found.worker(say("hello"))
        for secret in secrets:
            for carrier in CARRIERS:
                headers = {**presented(secret, carrier), "x-note": "a note", "origin": "https://app.example"}
                other = {**headers, **presented(UNKNOWN + "-2", CARRIERS[1 - CARRIERS.index(carrier)])}
                worker.script = say("hello")
                answers = [
                    await client.chat(headers=headers),
                    await client.chat(headers=headers, stream=True),
                    await client.chat(headers=other),
                    await client.call("POST", "/v1/responses", {"model": "m", "input": "hi"}, headers=headers),
                    await client.call("POST", "/v1/messages", b"{", headers=headers),
                    await client.call(
                        "POST", "/v1/files", form(b"{}\n", purpose="batch"), headers={**headers, **FORM_HEADERS}
                    ),
                    await client.call("GET", "/v1/files", headers=headers),
                    await client.call("POST", "/busy_threshold", {}, headers=headers),
                    await client.call("GET", "/admin/usage", headers=headers),
                    await client.call("GET", "/metrics", headers=headers),
                    await client.call("GET", "/nothing", headers=headers),
                    *[
                        await client.call("GET", path, headers=headers)
                        for path in ("/", "/docs", "/openapi.json", "/health")
                    ],
                ]
                worker.script = fail(ValueError("broken"))
                answers += [await client.chat(headers=headers), await client.chat(headers=headers, stream=True)]
                seen += [repr(answer.headers) + answer.body.decode("latin-1") for answer in answers]
        worker.script = say("hello")
        upload = await client.call(
            "POST",
            "/v1/files",
            form(jsonl([chat_line("a")]), purpose="batch"),
            headers={**bearer("good"), **FORM_HEADERS},
        )
        made = {"input_file_id": upload.json["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await client.call("POST", "/v1/batches", made, headers=bearer("good"))).json
        async with asyncio.timeout(PATIENCE_SECONDS):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.02)
                batch = (await client.call("GET", f"/v1/batches/{batch['id']}", headers=bearer("good"))).json
        assert batch["status"] == "completed"
        seen.append(found.frontend.metrics.expose().decode())
        for context, request in zip(worker.contexts, worker.requests, strict=True):
            seen.append(repr(request) + repr(context.metadata) + repr(context.trace))
    seen += [repr(vars(record)) + record.getMessage() for record in caplog.records]
    seen += [span.to_json() for span in exported.get_finished_spans()]
    files = contents(tmp_path)
    seen += files.values()
    whole = "\n".join(seen)
    assert "a note" in whole  # the recordings do have headers
    assert {"access.log", "audit.log", "usage.sqlite", "responses.sqlite"} <= files.keys()
    assert any(name.startswith("trace.") for name in files)
    assert exported.get_finished_spans()
    for secret in secrets:
        assert secret not in whole
        assert secret.rpartition(".")[2] not in whole

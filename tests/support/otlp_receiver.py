"""A collector of OpenTelemetry in this process: OTLP over HTTP, protobuf. What was exported is `spans`."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.processes import wait

ERROR = 2  # of a span's status
SERVER, CLIENT, INTERNAL = 2, 3, 1


@dataclass
class Span:
    """One exported span; ids are hexadecimal."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    status: int
    events: list[str] = field(default_factory=list)


class OtlpReceiver:
    """Takes whatever is sent to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.spans: list[Span] = []
        self.raw = b""

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that exports to it, soon after each span."""
        return {
            "OTEL_EXPORT_ENABLED": "1",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def take(self, body: bytes) -> None:
        self.raw += body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(names.get("service.name", ""), span) for span in scope.spans]

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait_trace(self, trace_id: str, count: int) -> list[Span]:
        """The spans of a trace, once there are so many."""
        wait(
            lambda: len(self.trace(trace_id)) >= count,
            lambda: f"{count} spans; got {[(one.service, one.name) for one in self.trace(trace_id)]}",
        )
        return self.trace(trace_id)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        """Answers `/v1/traces`."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = OtlpReceiver(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        {one.key: _value(one.value) for one in span.attributes},
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code,
        [event.name for event in span.events],
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)

"""Spans that are exported, kept for a test to look at. For conftest.py of a folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynamo.runtime.observe.tracing import Tracing, install_tracing, reset_tracing

__all__ = ["exported"]


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """Switch the export of spans on, into memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    install_tracing(Tracing(provider))
    yield exporter
    reset_tracing()

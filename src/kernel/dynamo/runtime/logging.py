"""The public path of log records, as the native system has it; they are made in `dynamo.runtime.observe.logging`."""

from __future__ import annotations

from dynamo.runtime.observe.logging import LogHandler, configure_dynamo_logging

__all__ = ["LogHandler", "configure_dynamo_logging"]

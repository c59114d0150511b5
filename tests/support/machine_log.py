"""The log of this process as a collector reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dynamo.runtime.observe.logging import configure_dynamo_logging


class MachineLog:
    """What was logged since `machine_log` began."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._text = ""

    def records(self, message: str | None = None, target: str | None = None) -> list[dict[str, Any]]:
        """The records with this message and target; every line of the output must be an object."""
        self._text += self._capture.readouterr().err
        found = [json.loads(line) for line in self._text.splitlines()]
        return [
            record for record in found if message in (None, record["message"]) and target in (None, record["target"])
        ]

    def only(self, message: str, target: str | None = None) -> dict[str, Any]:
        """The one record with this message."""
        (found,) = self.records(message, target)
        return found


@contextmanager
def machine_log(
    monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str], **env: str
) -> Iterator[MachineLog]:
    """Log as JSON lines within the block; `env` are further variables of the logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with monkeypatch.context() as patched:
        for name, value in {"DYN_LOGGING_CONSOLE_FORMAT": "jsonl", **env}.items():
            patched.setenv(name, value)
        configure_dynamo_logging()
        capture.readouterr()
        try:
            yield MachineLog(capture)
        finally:
            patched.undo()
            configure_dynamo_logging()
            root.handlers[:] = handlers
            root.setLevel(level)

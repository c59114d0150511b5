"""What a frontend keeps of its requests, from its settings."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import dynamo
from dynamo.frontend.parts.recording.bundles import FailureNotes
from dynamo.frontend.parts.recording.failures import FailureRing
from dynamo.frontend.parts.recording.recorder import RequestRecorder
from dynamo.frontend.parts.recording.recording import Recording
from dynamo.frontend.parts.recording.redaction import load_redaction
from dynamo.frontend.settings import FrontendSettings
from dynamo.settings.table import without_secrets

__all__ = ["open_recording"]


def open_recording(settings: FrontendSettings, dropped: Callable[[str, int], None]) -> Recording:
    """Return what keeps requests. `dropped` counts records that are not written, by reason, in any thread.

    Raises InvalidArgument for a redaction that cannot be imported.
    """
    given, trace = settings.recording, settings.request_trace
    redact = load_redaction(trace.redact)
    ring = FailureRing(given.keep_failed, given.keep_failed_bytes, process=lambda: _process(settings))
    failures = FailureNotes(ring, redact, keeps_content=given.keep_failed_content)
    return Recording(failures, RequestRecorder(trace, redact, dropped) if trace.is_on else None)


def _process(settings: FrontendSettings) -> Mapping[str, Any]:
    """Return what all bundles of this process share: its versions, and the settings that are not the defaults."""
    defaults = without_secrets(FrontendSettings())
    return {
        "pid": os.getpid(),
        "version": dynamo.__version__,
        "python": platform.python_version(),
        "settings": _differing(without_secrets(settings), defaults),
    }


def _differing(value: Any, default: Any) -> Any:
    """Return the members of nested dictionaries that differ, as JSON values."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value if isinstance(value, bool | int | float | str | None) else str(value)
    return {name: _differing(found, default.get(name)) for name, found in value.items() if found != default.get(name)}

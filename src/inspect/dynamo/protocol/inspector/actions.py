"""The actions that the inspector takes, and its answers."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Reason = Annotated[str, Meta(max_length=500)]


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of an abort; it may be left out."""

    reason: Reason = ""  # the client reads it, and so does the audit log


class AbortResult(Struct, kw_only=True):
    """What became of an abort."""

    id: str
    status: str  # aborting, or aborted: it had ended so before
    frontend: str
    phase: str | None = None  # in which it was
    workers: list[str] = []  # that were sent its end
    message: str = ""


class BulkAbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Ends every request that a filter holds for."""

    filter: Annotated[str, Meta(min_length=1, max_length=1024)]
    dry_run: bool = True  # only count them
    reason: Reason = ""


class BulkAbortResult(Struct, kw_only=True):
    """What a filter holds for, or the requests it has ended."""

    matched: int
    aborted: int
    dry_run: bool
    ids: list[str] = []  # the first hundred
    partial: list[str] = []  # members that did not answer in time


class WorkerActionRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `drain`, `undrain` and `quarantine`; it may be left out."""

    reason: Reason = ""
    seconds: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """How long it lasts. None: a drain lasts until it is taken back, a quarantine for a minute."""


class WorkerActionResult(Struct, kw_only=True):
    """The state of a worker after an action."""

    id: str
    state: str
    until_ms: int | None = None
    running: int = 0  # requests that this worker still has
    message: str = ""
    partial: list[str] = []  # other frontends of the cluster that did not do so


class ExplainRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request that is only placed. It has one of `messages`, `prompt` and `token_ids`."""

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    priority: int | None = None

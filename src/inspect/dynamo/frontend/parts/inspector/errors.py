"""Failures by kind, as rows."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from dynamo.frontend.base.failures import FailureGroup, FailureRing
from dynamo.protocol.inspector.views import ErrorGroup

HIDDEN: Final = "(not shown: it may repeat what the client wrote)"


def error_rows(ring: FailureRing | None, limit: int) -> list[ErrorGroup]:
    """Return the kinds of failures, the one that failed last first."""
    return [] if ring is None else [_row(group) for group in ring.grouped(limit)]


def without_texts(rows: list[ErrorGroup]) -> list[ErrorGroup]:
    """Return the rows as viewers may see them that see no content: what is wrong with a request may repeat all of it."""
    return [msgspec.structs.replace(row, message=HIDDEN) if row.status in (400, 422) else row for row in rows]


def _row(group: FailureGroup) -> ErrorGroup:
    kind = (str(group.status), group.code, group.model, group.worker, group.template)
    return ErrorGroup(
        id=hashlib.blake2b("\0".join(kind).encode(), digest_size=8).hexdigest(),
        status=group.status,
        code=group.code or None,
        model=group.model or None,
        worker=group.worker or None,
        message=group.template,
        count=group.count,
        per_minute=group.rate_per_minute,
        first_ms=group.first_ms,
        last_ms=group.last_ms,
        example=group.example_id or "",
    )

"""Requests of the Files and Batches APIs, every field checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from dynamo.protocol.batches.lines import ENDPOINTS
from dynamo.protocol.batches.objects import BATCH_OUTPUT, PURPOSES
from dynamo.protocol.openai.errors import RequestRejected

CREATED_AT: Final = "created_at"
MIN_EXPIRY: Final = 3600  # seconds
MAX_EXPIRY: Final = 2_592_000
MAX_FILE_PAGE: Final = 10_000
MAX_BATCH_PAGE: Final = 100
DEFAULT_BATCH_PAGE: Final = 20
COMPLETION_WINDOW: Final = "24h"
MAX_METADATA: Final = 16
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512
MAX_FILENAME: Final = 255  # characters
MAX_ID: Final = 128  # characters of an id that is looked up

Query = Mapping[str, Sequence[str]]


class CreateBatch(Struct, kw_only=True):
    """A batch to be made."""

    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None = None
    output_expires_seconds: int | None = None


class FileForm(Struct, kw_only=True):
    """The fields beside an uploaded file."""

    purpose: str
    expires_seconds: int | None = None


class PageQuery(Struct, kw_only=True):
    """One page of a list."""

    limit: int
    after: str | None = None
    is_descending: bool = True
    purpose: str | None = None


class _Body(Struct):
    input_file_id: Any = None
    endpoint: Any = None
    completion_window: Any = None
    metadata: Any = None
    output_expires_after: Any = None


def refused(message: str, param: str | None = None) -> RequestRejected:
    """Return the 400 for a field."""
    return RequestRejected(400, message, param=param, stream_type="invalid_request_error")


def decode_create_batch(body: bytes) -> CreateBatch:
    """Read the request that makes a batch. Raises RequestRejected."""
    try:
        given = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(f"The body is not a JSON object: {str(error)[:200]}") from None
    for name in ("input_file_id", "endpoint", "completion_window"):
        value = getattr(given, name)
        if value is None:
            raise refused(f"Missing required parameter: '{name}'.", name)
        if not isinstance(value, str) or len(value) > MAX_ID:
            raise refused(f"{name} must be a string of at most {MAX_ID} characters.", name)
    if given.endpoint not in ENDPOINTS:
        raise refused(f"endpoint must be one of {', '.join(ENDPOINTS)}, got '{given.endpoint}'.", "endpoint")
    if given.completion_window != COMPLETION_WINDOW:
        raise refused(
            f"completion_window must be '{COMPLETION_WINDOW}', got '{given.completion_window}'.", "completion_window"
        )
    return CreateBatch(
        input_file_id=given.input_file_id,
        endpoint=given.endpoint,
        metadata=_metadata(given.metadata),
        output_expires_seconds=_output_expiry(given.output_expires_after),
    )


def file_form(fields: Mapping[str, str]) -> FileForm:
    """Read the fields beside an uploaded file. Raises RequestRejected."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise refused("Missing required parameter: 'purpose'.", "purpose")
    if purpose not in PURPOSES:
        raise refused(f"purpose must be one of {', '.join(PURPOSES)}, got '{purpose[:64]}'.", "purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return FileForm(purpose=purpose)
    if anchor != CREATED_AT:
        raise refused(f"expires_after[anchor] must be '{CREATED_AT}'.", "expires_after[anchor]")
    if seconds is None or not seconds.isascii() or not seconds.isdecimal() or len(seconds) > 10:
        raise refused("expires_after[seconds] must be a whole number.", "expires_after[seconds]")
    return FileForm(purpose=purpose, expires_seconds=_expiry(int(seconds), "expires_after[seconds]"))


def file_page_query(query: Query) -> PageQuery:
    """Read the query of the list of files. Raises RequestRejected."""
    order, purpose = _one(query, "order") or "desc", _one(query, "purpose")
    if order not in ("asc", "desc"):
        raise refused(f"order must be asc or desc, got '{order[:64]}'.", "order")
    if purpose is not None and purpose not in (*PURPOSES, BATCH_OUTPUT):
        raise refused(f"purpose must be one of {', '.join((*PURPOSES, BATCH_OUTPUT))}.", "purpose")
    limit = _limit(query, MAX_FILE_PAGE, MAX_FILE_PAGE)
    return PageQuery(limit=limit, after=_after(query), is_descending=order == "desc", purpose=purpose)


def batch_page_query(query: Query) -> PageQuery:
    """Read the query of the list of batches. Raises RequestRejected."""
    return PageQuery(limit=_limit(query, DEFAULT_BATCH_PAGE, MAX_BATCH_PAGE), after=_after(query))


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > MAX_METADATA:
        raise refused(f"metadata must be an object of at most {MAX_METADATA} members.", "metadata")
    for name, value in given.items():
        if len(name) > MAX_METADATA_KEY:
            raise refused(f"A key of metadata has at most {MAX_METADATA_KEY} characters.", "metadata")
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            text = f"metadata.{name} must be a string of at most {MAX_METADATA_VALUE} characters."
            raise refused(text, f"metadata.{name}")
    return given


def _output_expiry(given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("anchor") != CREATED_AT:
        text = f"output_expires_after must be an object with the anchor '{CREATED_AT}'."
        raise refused(text, "output_expires_after.anchor")
    seconds = given.get("seconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise refused("output_expires_after.seconds must be a whole number.", "output_expires_after.seconds")
    return _expiry(seconds, "output_expires_after.seconds")


def _expiry(seconds: int, param: str) -> int:
    if not MIN_EXPIRY <= seconds <= MAX_EXPIRY:
        raise refused(f"{param} must be between {MIN_EXPIRY} and {MAX_EXPIRY}, got {seconds}.", param)
    return seconds


def _limit(query: Query, default: int, largest: int) -> int:
    given = _one(query, "limit")
    if given is None:
        return default
    if not given.isascii() or not given.isdecimal() or len(given) > 6 or not 1 <= int(given) <= largest:
        raise refused(f"limit must be between 1 and {largest}, got '{given[:64]}'.", "limit")
    return int(given)


def _after(query: Query) -> str | None:
    after = _one(query, "after")
    if after is not None and len(after) > MAX_ID:
        raise refused(f"after must have at most {MAX_ID} characters.", "after")
    return after


def _one(query: Query, name: str) -> str | None:
    return query[name][-1] if query.get(name) else None

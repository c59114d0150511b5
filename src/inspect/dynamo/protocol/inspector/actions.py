"""The actions that the inspector takes, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from dynamo.protocol.inspector.views import (
    VIEWS,
    ErrorGroup,
    EventView,
    Patch,
    Picture,
    RecentView,
    RequestDetail,
    RoutingView,
    SettingView,
)
from dynamo.protocol.openai.errors import phrase_of
from dynamo.protocol.openai.schema import EVENTS, ErrorBody, json_content, path_parameter, query_parameter

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


# The inspector's API as an OpenAPI 3.1 document of its own: the listener of operators serves it, and no client's does.

INSPECTOR_DOCUMENT_PATH: Final = "/admin/v1/openapi.json"

_BASE: Final = "/admin/v1/"
_REFERENCE: Final = "#/components/schemas/{name}"


class RecentList(Struct):
    data: list[RecentView]
    total: int
    partial: list[str]  # processes that did not answer in time


class ErrorList(Struct):
    data: list[ErrorGroup]
    total: int
    partial: list[str]


class RoutingList(Struct):
    data: list[RoutingView]
    total: int
    partial: list[str]


class EventList(Struct):
    data: list[EventView]
    total: int
    partial: list[str]


class Explanation(Struct):
    routing: list[RoutingView]


_TYPES: Final = (
    Picture, Patch, RequestDetail, RecentList, ErrorList, RoutingList, EventList, SettingView, ExplainRequest, Explanation,
    AbortRequest, AbortResult, BulkAbortRequest, BulkAbortResult, WorkerActionRequest, WorkerActionResult, ErrorBody,
)  # fmt: skip

_TEXTS: Final = {
    400: "A parameter or the body is not understood; `error.param` names it.",
    401: "There is no key and no token, or it is unknown.",
    403: "The role of the key does not allow it, the inspector is read-only, or the request may come from another site.",
    404: "There is nothing with this id.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    429: "Too many actions, or too many viewers; see `Retry-After`.",
    503: "Other processes or workers do not answer.",
}
_NEEDED: Final = ("BulkAbortRequest", "ExplainRequest")  # the other bodies may be left out
_CLOSED: Final = (401, 403)
_BODY: Final = (400, 408, 413, 503)


_LIMIT: Final = query_parameter(
    "limit", {"type": "integer", "minimum": 1, "maximum": 1000}, description="How many entries."
)
_FILTER: Final = query_parameter(
    "filter", {"type": "string", "maxLength": 1024}, description="Terms that all have to hold."
)
_PICTURE: Final = (
    query_parameter(
        "views", {"type": "array", "items": {"type": "string", "enum": list(VIEWS)}}, description="What to show.",
        style="form", explode=False,
    ),
    _LIMIT,
    _FILTER,
    query_parameter("sort", {"type": "string"}, description="What streams are sorted by; `-` before it turns the order round."),
)  # fmt: skip
_ID: Final = path_parameter("id")


def _operation(
    name: str,
    summary: str,
    content: Mapping[str, Any],
    *statuses: int,
    parameters: Sequence[Mapping[str, Any]] = (),
    body: str = "",
    success: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Return one operation; `statuses` are those of its failures, `success` those of its answers: 200 alone where none are given."""
    answers = success or {200: summary + "."}
    failures = sorted({*_CLOSED, *statuses})
    described: dict[str, Any] = {"operationId": name, "summary": summary, "security": [{"bearer": []}]}
    if parameters:
        described["parameters"] = [dict(each) for each in parameters]
    if body:
        described["requestBody"] = {"required": body in _NEEDED, "content": json_content(body)}
    described["responses"] = {
        **{str(status): {"description": text, "content": dict(content)} for status, text in answers.items()},
        **{
            str(status): {"description": f"{phrase_of(status)}. {_TEXTS[status]}", "content": json_content("ErrorBody")}
            for status in failures
        },
    }
    return described


def _array(name: str) -> dict[str, Any]:
    items = {"$ref": _REFERENCE.format(name=name)}
    return {"application/json": {"schema": {"type": "array", "items": items}}}


def _object() -> dict[str, Any]:
    return {"application/json": {"schema": {"type": "object"}}}


def _looking() -> dict[str, Any]:
    listed = (_LIMIT,)
    return {
        "snapshot": _operation("takeSnapshot", "One picture", json_content("Picture"), 400, parameters=_PICTURE),
        "watch": _operation(
            "watch",
            "Server-sent events: `snapshot` with a `Picture`, then `patch` with a `Patch`, at most once a second",
            EVENTS, 400, 429,
            parameters=[*_PICTURE, {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}],
        ),
        "requests/{id}": _operation(
            "getRequest", "One request in flight, or that has ended", json_content("RequestDetail"), 404, parameters=[_ID]
        ),
        "recent": _operation(
            "listRecent", "Requests that have ended, the newest first", json_content("RecentList"), 400,
            parameters=[_LIMIT, _FILTER],
        ),
        "errors": _operation(
            "listErrors", "Failures that look alike", json_content("ErrorList"), 400, parameters=listed
        ),
        "errors/{id}": _operation("getBundle", "The bundle of a failed request", _object(), 404, parameters=[_ID]),
        "routing/recent": _operation(
            "listRouting", "Routing decisions, kept while somebody looks", json_content("RoutingList"), 400,
            parameters=listed,
        ),
        "events": _operation("listEvents", "What happened", json_content("EventList"), 400, parameters=listed),
        "config": _operation("getConfig", "The settings in force", _array("SettingView")),
    }  # fmt: skip


def _acting() -> dict[str, Any]:
    worker = json_content("WorkerActionResult")
    told = {202: "It is being ended, or had ended so before."}
    counted = {200: "How many there are.", 202: "How many are being ended."}
    return {
        "requests/{id}/abort": _operation(
            "abortRequest", "End a request", json_content("AbortResult"), 404, 429, *_BODY,
            parameters=[_ID], body="AbortRequest", success=told,
        ),
        "requests/abort": _operation(
            "abortMatching", "Count, or end, the requests that a filter holds for", json_content("BulkAbortResult"),
            429, *_BODY, body="BulkAbortRequest", success=counted,
        ),
        "routing/explain": _operation(
            "explainRouting", "Where a request would go now, without sending it", json_content("Explanation"),
            404, 429, *_BODY, body="ExplainRequest",
        ),
        **{
            f"workers/{{id}}/{name}": _operation(
                f"{name}Worker", text, worker, 404, 429, *_BODY, parameters=[_ID], body="WorkerActionRequest"
            )
            for name, text in (
                ("drain", "Keep new requests from a worker"),
                ("quarantine", "Make a worker the last choice, for a time"),
                ("undrain", "Take back a drain or a quarantine"),
            )
        },
    }  # fmt: skip


def inspector_json() -> bytes:
    """Return the document; make it once, the answer never changes."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REFERENCE)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Dynamo inspector", "version": "1"},
        "paths": {
            **{_BASE + path: {"get": operation} for path, operation in _looking().items()},
            **{_BASE + path: {"post": operation} for path, operation in _acting().items()},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key with a role, or the token of a frontend without keys.",
                }
            },
        },
    }
    return msgspec.json.encode(document)

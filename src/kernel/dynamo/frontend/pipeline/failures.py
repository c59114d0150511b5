"""How a failed request is answered, and how the metrics name the failure."""

from __future__ import annotations

from typing import Final, NamedTuple

from dynamo.errors import DynamoException, NoReplacement, RequestKillsWorkers, describe, http_assertion, rule_of
from dynamo.frontend.admission.model import Reason, Shed
from dynamo.frontend.admission.process import NotReady
from dynamo.frontend.base.access import key_rejection
from dynamo.frontend.base.shares import share_exceeded
from dynamo.frontend.pipeline.exchange import KeyRevoked, RequestAborted
from dynamo.protocol.openai.errors import (
    NOT_BUILT_CODE,
    RequestRejected,
    aborted,
    model_not_ready,
    not_ready,
    rejection_for,
)


class FailureLabels(NamedTuple):
    """The labels of a failure."""

    error_type: str
    failure_class: str
    reason: str


_BY_STATUS: Final = {
    400: FailureLabels("validation", "InvalidRequest", "request.invalid"),
    404: FailureLabels("not_found", "NotFound", "request.not_found"),
    503: FailureLabels("unavailable", "Unavailable", "runtime.unavailable"),
    504: FailureLabels("response_timeout", "DeadlineExceeded", "backend.response_timeout"),
}
_NOT_BUILT: Final = FailureLabels("not_implemented", "NotImplemented", "runtime.not_implemented")
_INTERNAL: Final = FailureLabels("internal", "Internal", "runtime.internal")


def rejection_of(error: BaseException, *, overload_status: int) -> RequestRejected:
    """Return the answer that `error` stands for; `overload_status` is the status of every "full" answer."""
    if isinstance(error, NotReady):
        return not_ready()
    if isinstance(error, KeyRevoked):
        return key_rejection("key_revoked", str(error))
    if isinstance(error, RequestAborted):
        return aborted(str(error))
    if isinstance(error, Shed) and error.reason is Reason.SHARE:
        return share_exceeded("this model", retry_after_seconds=error.retry_after_seconds)
    if isinstance(error, NoReplacement):  # the answer that the next request gets, which finds no model to wait for
        return model_not_ready(error.model)
    return rejection_for(error, overload_status=overload_status)


_FALLBACK_KINDS: Final = {503: "unavailable", 529: "overloaded", 504: "timeout", 500: "failed"}


def failure_kind(error: Exception) -> str | None:
    """Return the kind of a failure for which another model may serve; None: the request would fail there, too."""
    if isinstance(error, NoReplacement):
        return "unavailable"
    if isinstance(error, RequestRejected):
        return "unavailable" if error.status == 503 else None
    return _FALLBACK_KINDS.get(rule_of(error).status)


def classify(error: BaseException, rejected: RequestRejected) -> FailureLabels:
    """Return the labels of `error`, which was answered with `rejected`."""
    if rejected.code == NOT_BUILT_CODE:
        return _NOT_BUILT
    status = rejected.status
    if isinstance(error, RequestRejected | NotReady) or not isinstance(error, DynamoException):
        found = _BY_STATUS.get(status)
        return found or (_BY_STATUS[400] if 400 <= status < 500 else _INTERNAL)
    record = describe(error)
    if isinstance(error, RequestKillsWorkers):  # a 4xx, as clients must not send it again; but no client's mistake
        return FailureLabels("internal", record["class"], record["reason"])
    if rule_of(error).status == 529:
        error_type = "overload"
    elif status == 499:
        error_type = "cancelled"
    elif 400 <= status < 500:
        error_type = "validation" if status != 404 else "not_found"
    elif status in (503, 504):
        error_type = _BY_STATUS[status].error_type
    else:
        error_type = "internal"
    if http_assertion(error) is not None and 400 <= status < 500:
        return FailureLabels(error_type, "InvalidRequest", "backend.invalid_argument")
    return FailureLabels(error_type, record["class"], record["reason"])

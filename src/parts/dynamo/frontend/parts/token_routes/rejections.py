"""How the routes of tokens write what is no answer."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.protocol.dialect import Dialect
from dynamo.protocol.openai.errors import NOT_BUILT_CODE, RequestRejected
from dynamo.protocol.openai.sse import DONE

UNPARSED: Final = "Failed to parse the request body as JSON: "
UNFIT: Final = "Failed to deserialize the JSON body into the target type: "
PREFIX: Final = "Validation: "  # of the rules of other routes; these write the rule alone
INTERNAL: Final = "internal server error"
CANCELLED: Final = "request was cancelled"

_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found",
    429: "overloaded",
    499: "request_cancelled",
    500: "internal_error",
    501: "not_implemented",
    503: "service_unavailable",
    529: "overloaded",
}


class NotJson(RequestRejected):
    """A body that is not JSON. Its answer is text."""

    def __init__(self, detail: str) -> None:
        super().__init__(400, UNPARSED + detail)

    def as_type(self) -> str:
        """Return the text of a route that answers every such body alike."""
        return UNFIT + self.message.removeprefix(UNPARSED)


class NotTheType(RequestRejected):
    """JSON of another shape than the route takes."""

    def __init__(self, detail: str, param: str | None) -> None:
        super().__init__(400, UNFIT + detail, param=param)

    def as_type(self) -> str:
        """Return the text of a route that answers every such body alike."""
        return self.message


def invalid(message: str, param: str) -> RequestRejected:
    """Return the rejection for a broken rule."""
    return RequestRejected(400, message, param=param)


def not_implemented(message: str) -> RequestRejected:
    """Return the rejection for what this route has not in this version, as 1.6.1 answers it."""
    return RequestRejected(501, message, code=NOT_BUILT_CODE)


def type_of(rejected: RequestRejected) -> str:
    """Return the `type` of an error."""
    if rejected.status in _TYPES:
        return _TYPES[rejected.status]
    if rejected.status in (401, 403):
        return rejected.stream_type
    return _TYPES[400] if rejected.status < 500 else _TYPES[500]


def text_of(rejected: RequestRejected) -> str:
    """Return the text of an error. Of a fault inside, clients read nothing but that."""
    if rejected.status == 500:
        return INTERNAL
    return CANCELLED if rejected.status == 499 and rejected.code is None else rejected.message.removeprefix(PREFIX)


class VllmDialect(Dialect):
    """The errors of vLLM's route."""

    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        if isinstance(rejected, NotJson):
            return rejected.message.encode()
        if isinstance(rejected, NotTheType):
            return msgspec.json.encode({"message": rejected.message, "type": rejected.type, "code": rejected.status})
        return _nested(rejected)

    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        return b"data: %b\n\n%b" % (_nested(rejected), DONE)

    def unknown_model(self, model: str, served: object = ()) -> RequestRejected:
        return RequestRejected(404, f"Model not found: {model}", param="model", code="model_not_found")


def _nested(rejected: RequestRejected) -> bytes:
    error = {"message": text_of(rejected), "type": type_of(rejected), "code": rejected.status}
    return msgspec.json.encode({"error": error})


VLLM: Final = VllmDialect()


class SglangRejected(RequestRejected):
    """What SGLang's route refuses by its own rules."""


class SglangUnfit(SglangRejected):
    """A body that is not JSON, or of another shape than SGLang's route takes."""


class SglangDialect(Dialect):
    """The errors of SGLang's route."""

    def error_body(self, rejected: RequestRejected, request_id: str) -> bytes:
        text = rejected.message.removeprefix(PREFIX)
        if not isinstance(rejected, SglangUnfit):
            return msgspec.json.encode({"error": {"message": text}})
        error = {"object": "error", "message": text, "type": rejected.type, "param": None, "code": rejected.status}
        return msgspec.json.encode(error)

    def stream_failure(self, rejected: RequestRejected, request_id: str) -> bytes:
        return b"data: %b\n\n%b" % (msgspec.json.encode({"error": {"message": rejected.message}}), DONE)

    def unknown_model(self, model: str, served: object = ()) -> RequestRejected:
        return RequestRejected(404, f"Model not found: {model}", param="model", code="model_not_found")


SGLANG: Final = SglangDialect()

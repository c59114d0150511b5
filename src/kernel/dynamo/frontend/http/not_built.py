"""Routes that are not served: what this version does not have, and what is switched off. Each answer names it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply_rejected
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.protocol.openai.errors import NOT_BUILT_CODE, RequestRejected, not_built, response_not_found

NOT_BUILT_ROUTES: Final = {
    "/v1/images/variations": "Varying images",
    "/v1/videos/stream": "Streaming videos",
    "/v1/videos/edits": "Editing videos",
    "/v1/videos/extensions": "Extending videos",
    "/v1/videos/characters": "Characters of videos",
    "/v1/videos/{video_id}/remix": "Varying videos",
}


class NotBuiltRoute:
    """Answers every request with the 422 of what is not built; nothing of its body is read."""

    def __init__(self, what: str) -> None:
        self._what = what

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, not_built(f"{self._what} is not in this version"))


def switched_off(parts: Collection[str], responses_path: str) -> Iterator[GuardedRoute]:
    """Give the routes of all parts that are not among `parts`."""
    if "batches" not in parts:
        for base, access in (("/v1/files", Access.FILES), ("/v1/batches", Access.BATCHES)):
            for below in ("", "/{rest:path}"):
                yield GuardedRoute(base + below, _files_are_off, "GET", "POST", "DELETE", access=access)
    if "scaling" not in parts:
        for below in ("", "/{model:path}"):
            yield GuardedRoute("/autoscale/v1" + below, _autoscale_is_off, "GET", access=Access.METRICS)
    if "keys" not in parts:
        yield GuardedRoute("/admin/usage", _no_keys, "GET", access=Access.ADMIN)
    if "stored_responses" not in parts:
        one, nothing = responses_path + "/{response_id}", _NothingIsStored()
        yield GuardedRoute(one, nothing, "GET", "DELETE", access=Access.INFERENCE)
        yield GuardedRoute(one + "/input_items", nothing, "GET", access=Access.INFERENCE)
        yield GuardedRoute(one + "/cancel", nothing, "POST", access=Access.INFERENCE)


class _Refusing:
    """Answers every request with one rejection."""

    def __init__(self, rejected: RequestRejected, *headers: tuple[bytes, bytes]) -> None:
        self._rejected, self._headers = rejected, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, self._rejected, self._headers)


class _NothingIsStored:
    """Answers as for a response that is not kept."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_rejected(send, response_not_found(scope["path_params"]["response_id"]))


_files_are_off = _Refusing(
    RequestRejected(
        501,
        "Files and batches are switched off: start the frontend with --files-dir DIR (or DYN_FILES_DIR)",
        stream_type="not_implemented",
        code=NOT_BUILT_CODE,
    ),
    (b"x-should-retry", b"false"),
    (b"connection", b"close"),
)
_autoscale_is_off = _Refusing(
    RequestRejected(501, "autoscale signals are switched off: start the frontend with --autoscale (DYN_AUTOSCALE=1)")
)
_no_keys = _Refusing(RequestRejected(404, "no keys are in use: start the frontend with --keys FILE"))

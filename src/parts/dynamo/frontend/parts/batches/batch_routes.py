"""`/v1/batches`: make, list, read and cancel batches."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

from dynamo.frontend.base.access import identity_of, owner_of
from dynamo.frontend.base.asgi import (
    BodyBudget,
    Receive,
    Scope,
    check_content_type,
    first_headers,
    read_body,
)
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.parts.batches.line_call import check_endpoint
from dynamo.frontend.parts.batches.service import BatchService
from dynamo.protocol.batches.objects import encode_object, list_page
from dynamo.protocol.batches.requests import batch_page_query, decode_create_batch

MAX_BODY_BYTES: Final = 64 * 1024


class BatchesRoute(JsonRoute):
    """POST and GET `/v1/batches`."""

    def __init__(self, service: BatchService, budget: BodyBudget) -> None:
        self._service, self._budget = service, budget

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        owner = owner_of(scope)
        if scope["method"] == "POST":
            headers = first_headers(scope)
            check_content_type(headers)
            request = decode_create_batch(await read_body(headers, receive, MAX_BODY_BYTES, self._budget.of(owner)))
            identity = identity_of(scope)
            check_endpoint(identity, request.endpoint)
            key_id = "" if identity is None else identity.id
            return encode_object(await self._service.create(request, owner, key_id))
        query = batch_page_query(parse_qs(scope["query_string"].decode("latin-1")))
        found, has_more = await self._service.page(owner, query)
        return list_page(found, has_more=has_more)


class BatchRoute(JsonRoute):
    """GET `/v1/batches/{id}`, and POST `/v1/batches/{id}/cancel`."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        act = self._service.cancel if scope["method"] == "POST" else self._service.get
        return encode_object(await act(scope["path_params"]["batch_id"], owner_of(scope)))

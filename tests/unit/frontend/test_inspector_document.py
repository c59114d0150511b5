"""The OpenAPI document of the inspector: where it is served, and that it has every route."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from dynamo.frontend.base.asgi import BodyBudget
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.parts.inspector.routes import INSPECTOR_PATH, InspectorRoutes
from dynamo.protocol.inspector.actions import INSPECTOR_DOCUMENT_PATH, inspector_json
from support.access import closed_cluster, key
from support.asgi_client import asgi_client
from support.frontend_cluster import cluster

DOCUMENT = json.loads(inspector_json())


async def test_it_describes_every_route_and_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        assert house.frontend.parts["inspector"].inspector is not None
        routes = InspectorRoutes(house.frontend.parts["inspector"].inspector, BodyBudget(SharedBound(1, None))).routes()
        served = {(path.replace(":path", ""), method.lower()) for path, _, methods, _ in routes for method in methods}
    assert served == {(path, method) for path, operations in DOCUMENT["paths"].items() for method in operations}
    names = [one["operationId"] for operations in DOCUMENT["paths"].values() for one in operations.values()]
    assert len(names) == len(set(names))


async def test_it_is_served_to_operators_and_no_document_of_clients_has_it(tmp_path: Path) -> None:
    for admin_port in (None, 0):
        async with cluster(tmp_path, http_host="127.0.0.1", admin_port=admin_port) as house:
            public = await house.client.get("/openapi.json")
            assert not [path for path in public.json["paths"] if path.startswith(INSPECTOR_PATH)]
            assert (await house.client.get(INSPECTOR_DOCUMENT_PATH)).status == (200 if admin_port is None else 404)
            async with asgi_client(house.frontend.admin_asgi) as operators:
                for path in ("/openapi.json", INSPECTOR_DOCUMENT_PATH):
                    assert (await operators.get(path)).json == DOCUMENT


async def test_it_needs_no_key_and_goes_with_the_inspector(tmp_path: Path) -> None:
    async with closed_cluster(tmp_path, key("boss", role="admin"), http_host="127.0.0.1") as house:
        assert (await house.client.get(INSPECTOR_DOCUMENT_PATH)).json == DOCUMENT
    async with cluster(tmp_path, http_host="127.0.0.1", inspector=InspectorSettings(is_on=False)) as house:
        assert (await house.client.get(INSPECTOR_DOCUMENT_PATH)).status == 404


def test_every_reference_leads_to_a_schema() -> None:
    text, schemas = inspector_json().decode(), DOCUMENT["components"]["schemas"]
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= schemas.keys()
    assert {"Picture", "RequestDetail", "ErrorBody", "AbortRequest"} <= named


async def test_the_schema_of_a_stream_of_events_is_that_of_one_event(tmp_path: Path) -> None:
    async with cluster(tmp_path, http_host="127.0.0.1") as house:
        public = (await house.client.get("/openapi.json")).json
    found = []
    for document in (public, DOCUMENT):
        for path, operations in document["paths"].items():
            for operation in operations.values():
                for answer in operation["responses"].values():
                    if described := answer.get("content", {}).get("text/event-stream"):
                        found.append(path)
                        schema = {**described["schema"], "components": document["components"]}
                        event = {"event": "image_edit.completed", "data": json.dumps({"type": "message_stop"})}
                        if path.startswith(("/v1/images", "/v1/audio", INSPECTOR_PATH)):
                            jsonschema.Draft202012Validator(schema).validate(event)
                        assert not jsonschema.Draft202012Validator(schema).is_valid(event["data"])
    assert {"/v1/chat/completions", "/v1/images/edits", "/v1/audio/speech", f"{INSPECTOR_PATH}watch"} <= set(found)

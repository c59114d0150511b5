"""The route by which an operator changes a model's taints, for workers without an engine class."""

from __future__ import annotations

from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.worker.controls import MODEL_TAINTS
from dynamo.worker.registration import RESERVED_TAINT_PREFIX, update_model_taints

__all__ = ["MODEL_TAINT_ROUTE", "TOPOLOGY_TAINT_PREFIX", "register_model_taint_route"]

MODEL_TAINT_ROUTE: Final = f"update/{MODEL_TAINTS}"
TOPOLOGY_TAINT_PREFIX: Final = RESERVED_TAINT_PREFIX


def register_model_taint_route(runtime: DistributedRuntime, endpoint: Endpoint) -> None:
    """Serve `POST /engine/update/model_taints` with the body `{"taints": [str, ...]}` for the model at `endpoint`.

    A body without a list of taints changes nothing: it is answered with 500, as by 1.6.1.
    """

    async def update(body: Any) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise InvalidArgument("the body must be a JSON object")
        return {"status": "ok", "taints": await update_model_taints(endpoint, body.get("taints"))}

    runtime.register_engine_route(MODEL_TAINT_ROUTE, update)

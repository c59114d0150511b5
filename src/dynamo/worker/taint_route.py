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
    """Serve `POST /engine/update/model_taints` with the body `{"taints": [str, ...]}` for the model at `endpoint`."""

    async def update(body: Any) -> dict[str, Any]:
        if not isinstance(body, dict):
            return {"status": "error", "message": f"the body must be an object, got {type(body).__name__}"}
        try:
            taints = await update_model_taints(endpoint, body.get("taints") or [])
        except InvalidArgument as error:
            return {"status": "error", "message": str(error)}
        return {"status": "ok", "taints": taints}

    runtime.register_engine_route(MODEL_TAINT_ROUTE, update)

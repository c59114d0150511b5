"""`GET /autoscale/v1/{model}`: the autoscale signal of a model, for autoscalers that read JSON."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from dynamo.frontend.base.asgi import Receive, Scope
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.parts.scaling.signals import AutoscaleSignals, RoleSignal
from dynamo.protocol.model_types import WorkerType
from dynamo.protocol.openai.errors import RequestRejected

__all__ = ["AUTOSCALE_PATH", "AutoscaleRoute"]

AUTOSCALE_PATH = "/autoscale/v1"
_ROLES = tuple(map(str, WorkerType))
_KNOWN = ("namespace", "role")


class AutoscaleRoute(JsonRoute):
    """One signal: of the role and namespace that the query names, else of the workers that answer, where they are fullest.

    Without a model in the path: all signals.
    """

    def __init__(self, signals: AutoscaleSignals | None) -> None:
        """`signals`: None where they are switched off."""
        self._signals = signals

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        if self._signals is None:
            raise RequestRejected(
                501, "autoscale signals are switched off: start the frontend with --autoscale (DYN_AUTOSCALE=1)"
            )
        name: str | None = scope["path_params"].get("model")
        query = {
            key: values[-1]
            for key, values in parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).items()
        }
        for key in query:
            if key not in _KNOWN:
                raise RequestRejected(
                    400, f"{key[:64]} is not a parameter; there are namespace and role", param=key[:64]
                )
        role, namespace = query.get("role"), query.get("namespace")
        if role is not None and role not in _ROLES:
            raise RequestRejected(400, f"role must be one of {', '.join(_ROLES)}, got {role[:64]!r}", param="role")
        found = [
            each
            for each in (self._signals.all() if name is None else self._signals.signals(name))
            if role in (None, each.role) and namespace in (None, each.namespace)
        ]
        if name is None:
            return msgspec.json.encode({"object": "list", "data": found})
        if not found:
            where = "" if role is None and namespace is None else " with this role and namespace"
            raise RequestRejected(404, f"there is no model {name[:128]!r}{where}", param="model")
        return msgspec.json.encode(max(found, key=lambda each: (_answers(each), each.value)))


def _answers(signal: RoleSignal) -> bool:
    return signal.role in (str(WorkerType.Aggregated), str(WorkerType.Decode))

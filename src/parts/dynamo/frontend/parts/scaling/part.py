"""Autoscale signals as a part: measured once a second, shown as metrics and as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import ClassVar
from urllib.parse import parse_qs

import msgspec

from dynamo.frontend.base.access import Access
from dynamo.frontend.base.asgi import Receive, Scope
from dynamo.frontend.http.json_route import JsonRoute
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.scaling.gauges import FAMILIES
from dynamo.frontend.parts.scaling.signals import MANY, AutoscaleSignals, NewDecision, RoleSignal
from dynamo.protocol.model_types import WorkerType
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.scaling.decide import ScaleRules


class AutoscalePart(Part):
    """How many workers there should be."""

    name: ClassVar[str] = "scaling"
    families = FAMILIES

    def __init__(self, kernel: Kernel, target: float) -> None:
        """`target`: how full workers are meant to be."""
        rules, reports_of = ScaleRules(0, MANY, target), kernel.loads.busy_workers.reports_of
        models, registry = kernel.pipeline.models, kernel.runtime.metrics
        self._signals = AutoscaleSignals(models, registry, reports_of, rules, kernel.peers, member=str(os.getpid()))
        self.on_decision: list[Callable[[NewDecision], None]] = []
        """Each is called with a load that needs another number of workers."""

    def routes(self) -> Sequence[GuardedRoute]:
        route = AutoscaleRoute(self._signals)
        return [
            GuardedRoute(AUTOSCALE_PATH + below, route, "GET", access=Access.METRICS) for below in ("", "/{model:path}")
        ]

    def measures(self) -> Sequence[Callable[[float], None]]:
        return (self._measure,)

    def _measure(self, now: float) -> None:
        for found in self._signals.measure(now):
            for take in self.on_decision:
                take(found)

    async def aclose(self) -> None:
        await self._signals.aclose()


AUTOSCALE_PATH = "/autoscale/v1"
_ROLES = tuple(map(str, WorkerType))
_KNOWN = ("namespace", "role")


class AutoscaleRoute(JsonRoute):
    """One signal: of the role and namespace that the query names, else of the workers that answer, where they are fullest.

    Without a model in the path: all signals.
    """

    def __init__(self, signals: AutoscaleSignals) -> None:
        self._signals = signals

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
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

"""The routes of operators and catalogues: health, liveness, metrics, the model list. None of them is hot."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from dynamo.frontend.admission.model import Reason, Urgency
from dynamo.frontend.admission.process import Admission, Stage
from dynamo.frontend.base.access import Caller, identity_of, is_closed
from dynamo.frontend.base.asgi import Receive, Scope, Send, first_headers, reply
from dynamo.frontend.base.metrics import FrontendMetrics
from dynamo.frontend.base.offload import Offload
from dynamo.frontend.base.peers import Peers
from dynamo.frontend.base.request_id import reject_route
from dynamo.frontend.base.shares import Shares
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.served import ServedModel
from dynamo.protocol.dialect import OPENAI, Dialect
from dynamo.protocol.messages.errors import MESSAGES, VERSION_HEADER
from dynamo.protocol.openai.errors import model_not_ready
from dynamo.runtime.observe.metrics import CONTENT_TYPE

LAG_SECONDS: Final = 1.0  # of the event loop: every stream of the process stood still for that long


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value)


class HealthRoute:
    """`/health`: 200 while requests are taken, whatever the models; 503 once draining began.

    A frontend that takes requests is healthy, however much it has to do: what it is short of stands under `degraded`, and
    what it is doing under `load`. Both are absent when there is nothing to report.
    """

    def __init__(
        self,
        admission: Admission,
        models: ModelDirectory,
        metrics: FrontendMetrics,
        peers: Peers | None = None,
        troubles: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`troubles`: what the parts of the frontend are short of, a sentence each."""
        self._admission, self._models, self._metrics, self._peers = admission, models, metrics, peers
        self._troubles = troubles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._admission.stage is not Stage.SERVING:
            body = {
                "status": "not_ready",
                "stage": self._admission.stage.value,
                "message": "Service is not ready",
            }
            await reply(send, 503, _encode(body))
            return
        if is_closed(scope) and not _sees_operations(scope):
            await reply(send, 200, _encode({"status": "healthy"}))
            return
        instances = self._models.instances()
        endpoints = sorted({f"dyn://{one['namespace']}.{one['component']}.{one['endpoint']}" for one in instances})
        healthy: dict[str, object] = {"status": "healthy", "endpoints": endpoints, "instances": instances}
        if self._peers is not None:
            healthy["processes"] = self._peers.describe()
        now = asyncio.get_running_loop().time()
        busy = [model for model in self._models.served() if model.admission.in_flight]
        if busy:
            healthy["load"] = [_load_of(model, now) for model in busy]
        queues = filter(None, [_queue_trouble(model, now) for model in busy])
        if degraded := [*self._loop_trouble(), *self._store_trouble(), *queues, *self._troubles()]:
            healthy["degraded"] = degraded
        await reply(send, 200, _encode(healthy))

    def _loop_trouble(self) -> Iterator[str]:
        lag = self._metrics.event_loop.lag.value
        if lag > LAG_SECONDS:
            yield f"the event loop ran a timer {lag:.1f} s late"

    def _store_trouble(self) -> Iterator[str]:
        trouble = self._models.store_trouble
        if trouble is not None:
            yield f"discovery: {trouble}; workers that come or go are not seen, and the last view is kept"


def _sees_operations(scope: Scope) -> bool:
    identity = identity_of(scope)
    return identity is not None and identity.sees_operations


def _load_of(model: ServedModel, now: float) -> dict[str, object]:
    admission = model.admission
    return {
        "model": model.name,
        "namespace": model.namespace,
        "in_flight": admission.in_flight,
        "waiting": admission.waiting,
        "queue_age_seconds": round(admission.queue_age_seconds(now), 3),
    }


def _queue_trouble(model: ServedModel, now: float) -> str | None:
    """Return why requests of the model are refused now; None while they are admitted."""
    reason = model.admission.rejection_reason(Urgency.NORMAL, now)
    if reason is None:
        return None
    if reason is Reason.QUEUE_AGE:
        return f"model {model.name}: the oldest of {model.admission.waiting} requests without a token waits for " + (
            f"{model.admission.queue_age_seconds(now):.0f} s"
        )
    return f"model {model.name}: {model.admission.in_flight} request(s) in flight of {model.admission.limit} allowed"


class ReadyRoute:
    """`/ready`: 200 while a request for at least one model can be served, or starts its workers; 503 with the reason until
    then, and once draining began. `/v1/models/{id}/ready` is the same of one model.
    """

    def __init__(self, admission: Admission, models: ModelDirectory) -> None:
        self._admission, self._models = admission, models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._reason()
        if reason is not None:
            await reply(send, 503, _encode({"status": "not_ready", "message": reason}))
        else:
            await reply(send, 200, _encode({"status": "ready", "message": "Requests are served"}))

    def _reason(self) -> str | None:
        """Return why no request can be served; None while one can."""
        if self._admission.stage is not Stage.SERVING:
            return f"The frontend is {self._admission.stage.value}"
        if any(
            True for model in self._models.models() if (found := self._models.readiness(model.name)) and found["ready"]
        ):
            return None
        if any(model.is_started_on_demand for model in self._models.models()):
            return None
        names = sorted({group.key.model for group in self._models.groups()})
        # No names: a probe needs no key, and names of models are for clients with one.
        if names:
            return f"{len(names)} model(s) are registered, and none can be called yet; /v1/models/ID/ready names what is missing"
        return "No worker has registered a model"


class LiveRoute:
    """`/live`: 200 until the listener is about to close."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._admission.stage is Stage.STOPPING:
            await reply(send, 503, _encode({"status": "shutting_down", "message": "Service is shutting down"}))
        else:
            await reply(send, 200, _encode({"status": "live", "message": "Service is live"}))


class MetricsRoute:
    """`/metrics` of the whole process, or of all that share its port."""

    def __init__(self, metrics: FrontendMetrics, offload: Offload, peers: Peers | None = None) -> None:
        self._metrics, self._offload, self._peers = metrics, offload, peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Hundreds of series take a millisecond or two: no stream should wait for a scrape.
        if self._peers is None:
            body = await self._offload(self._metrics.expose)
        else:
            try:
                snapshots = await self._peers.gather()
            except TimeoutError:  # the counters of one process alone would show a restart
                await reply(send, 503, _encode({"error": "The other frontend processes did not answer in time"}))
                return
            body = await self._offload(lambda: self._metrics.expose_group(snapshots))
        await reply(send, 200, body, content_type=CONTENT_TYPE.encode())


class SharesRoute:
    """`/admin/shares`: every bound that owners share, and what each of them has of it."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200, _encode({"object": "list", "data": await self._shares.report()}))


class OpenApiRoute:
    """An OpenAPI document; built on first use, because most frontends never serve it."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._body: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._body is None:
            self._body = self._make()
        await reply(send, 200, self._body)


OWNED_BY: Final = "dynamo"  # of a model whose engine names no owner

_READY = re.compile(r"^(?P<id>.+)/ready$")


_EPOCH: Final = "1970-01-01T00:00:00Z"


class ModelsRoute:
    """`/v1/models`, `/v1/models/{id}` and `/v1/models/{id}/ready`; an id may contain slashes."""

    def __init__(self, models: ModelDirectory, settings: HttpSettings) -> None:
        self._models, self._settings = models, settings
        self._base = settings.paths["models"].rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _model_id(scope, self._base)
        if name.startswith("/") and not any(map(self._models.names.is_expected, (name, name.removesuffix("/ready")))):
            name = name.lstrip("/")  # it is not the path of a model: there are slashes too many
        anthropic = VERSION_HEADER in first_headers(scope)
        dialect: Dialect = MESSAGES if anthropic else OPENAI
        identity = identity_of(scope)
        if not name:
            models = self._allowed(identity)
            await reply(send, 200, _encode(self._list(models, self._unloaded(identity), anthropic)))
            return
        ready = _READY.match(name)
        # A model may itself be called ".../ready": the registered name wins.
        if ready is not None and not self._models.is_registered(name):
            is_allowed = identity is None or identity.allows_model(ready["id"])
            body = self._models.readiness(ready["id"]) if is_allowed else None
            if body is None:
                is_expected = is_allowed and self._models.names.is_expected(ready["id"])
                rejected = (
                    model_not_ready(ready["id"])
                    if is_expected
                    else dialect.unknown_model(ready["id"], self._names(identity))
                )
                await reject_route(scope, send, rejected, dialect)
            else:
                await reply(send, 200 if body["ready"] else 503, _encode(body))
            return
        found = None if identity is not None and not identity.allows_model(name) else self._models.lookup(name)
        if found is None and name in self._unloaded(identity):
            await reply(send, 200, _encode(self._describe_name(name, anthropic)))
        elif found is None:
            await reject_route(scope, send, dialect.unknown_model(name, self._names(identity)), dialect)
        else:
            await reply(send, 200, _encode(self._describe(found, name, anthropic)))

    def _allowed(self, identity: Caller | None) -> list[ServedModel]:
        return [model for model in self._models.models() if identity is None or identity.allows_model(model.name)]

    def _names(self, identity: Caller | None) -> list[str]:
        return [*(model.name for model in self._allowed(identity)), *self._unloaded(identity)]

    def _unloaded(self, identity: Caller | None) -> list[str]:
        return [name for name in self._models.names.unloaded() if identity is None or identity.allows_model(name)]

    @staticmethod
    def _describe_name(name: str, anthropic: bool) -> dict[str, object]:
        """Describe what is served on demand, and of which no more is known before it is loaded."""
        if anthropic:
            return {"id": name, "display_name": name, "type": "model", "created_at": _EPOCH}
        return {"id": name, "object": "model", "created": 0, "owned_by": OWNED_BY}

    def _list(self, models: Sequence[ServedModel], unloaded: Sequence[str], anthropic: bool) -> Mapping[str, object]:
        data = [self._describe(model, model.name, anthropic) for model in models]
        data += [self._describe_name(name, anthropic) for name in unloaded]
        if anthropic:
            return {
                "data": data,
                "has_more": False,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
            }
        return {"object": "list", "data": data}

    def _describe(self, model: ServedModel, name: str, anthropic: bool) -> dict[str, object]:
        window = self._settings.context_window or model.context_length
        if anthropic:
            return {
                "id": name,
                "display_name": name,
                "type": "model",
                "created_at": model.created_at_text,
                "max_input_tokens": window,
            }
        body: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": model.card.runtime_config.runtime_data.get("owned_by") or OWNED_BY,
            # One length under the names that clients of different servers read.
            **dict.fromkeys(("context_window", "max_model_len", "context_length"), window),
        }
        if model.lora_name is not None:
            bases = self._models.base_names()
            body["root"] = body["parent"] = next((bases[id] for id in model.member_ids if id in bases), None)
        if self._settings.max_output_tokens is not None:
            body["max_output_tokens"] = self._settings.max_output_tokens
        return body


def _model_id(scope: Scope, base: str) -> str:
    """Return the part of the path behind the base. A name that is a path keeps its first slash."""
    path: str = scope["path"]
    return path[len(base) :].removeprefix("/").rstrip("/")

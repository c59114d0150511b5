"""The listener of trainers: one route, at a port of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import ClassVar, Final

import msgspec

from dynamo.errors import CannotConnect, DynamoException, Unknown
from dynamo.frontend.base.asgi import Receive, Scope, Send, reply
from dynamo.frontend.http.admin import AdminLimits
from dynamo.frontend.http.server import render_rejection
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.parts.switches import RlSettings
from dynamo.protocol.records import decode_model_record
from dynamo.runtime.calls.instances import decode_instance
from dynamo.runtime.calls.request_plane.base import Instance
from dynamo.runtime.discovery.base import INSTANCES, MODEL_CARDS
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.http.service import HttpService

logger = logging.getLogger(__name__)

PROTOCOL_VERSION: Final = 1
DEFAULT_NAMESPACE: Final = "dynamo"
QUESTION: Final = {"method": "routes"}
SHOWN: Final = ("model", "world_size", "admin_base_url")
"""Members of a worker's answer that are shown as they are, where the worker has them."""


class RlScope(msgspec.Struct, frozen=True):
    """The namespaces whose workers are listed; both None: all."""

    namespace: str | None
    prefix: str | None

    def covers(self, namespace: str) -> bool:
        """Return whether a worker of that namespace is shown."""
        if self.prefix is not None:
            return namespace.startswith(self.prefix)
        return self.namespace is None or namespace == self.namespace


class TrainerDirectory:
    """Lists the workers with an endpoint for trainers. Keeps nothing between two questions."""

    def __init__(self, runtime: DistributedRuntime, settings: RlSettings, scope: RlScope) -> None:
        self._runtime, self._settings, self._scope = runtime, settings, scope

    async def workers(self) -> dict[str, object]:
        """Return the answer of the route. Raises DynamoException or OSError where the store cannot be read."""
        found = await self._instances()
        slots = asyncio.Semaphore(self._settings.probes)
        shown = await asyncio.gather(*(self._shown(instance, slots) for instance in found))
        models = await self._models() if found else {}
        for entry, instance in zip(shown, found, strict=True):
            model = models.get((instance.namespace, instance.component, instance.instance_id))
            if model is not None:
                entry.setdefault("model", model)
        name = self._scope.prefix if self._scope.prefix is not None else self._scope.namespace
        return {"protocol_version": PROTOCOL_VERSION, "namespace": name, "workers": shown}

    async def _instances(self) -> Sequence[Instance]:
        settings, found = self._settings, list[Instance]()
        for key, value in (await self._runtime.discovery.get_prefix(INSTANCES)).items():
            try:
                instance = decode_instance(value)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                logger.warning("ignored the record of %s, which is not a valid instance: %s", key, error)
                continue
            is_wanted = not settings.components or instance.component in settings.components
            if instance.endpoint == settings.endpoint and is_wanted and self._scope.covers(instance.namespace):
                found.append(instance)
        return sorted(found, key=lambda one: (one.namespace, one.component, one.endpoint, one.instance_id))

    async def _models(self) -> Mapping[tuple[str, str, int], str]:
        """Return the model of each worker, by the first of its cards that is not that of an adapter."""
        found: dict[tuple[str, str, int], str] = {}
        for _, value in sorted((await self._runtime.discovery.get_prefix(MODEL_CARDS)).items()):
            try:
                record = decode_model_record(value)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue  # the frontend's own view of the cards reports it
            name = record.card_json.get("display_name")
            if record.model_suffix is None and isinstance(name, str):
                found.setdefault((record.namespace, record.component, record.instance_id), name)
        return found

    async def _shown(self, instance: Instance, slots: asyncio.Semaphore) -> dict[str, object]:
        path = f"{instance.namespace}.{instance.component}.{instance.endpoint}"
        entry: dict[str, object] = {
            "namespace": instance.namespace,
            "component": instance.component,
            "endpoint": instance.endpoint,
            "instance_id": instance.instance_id,
            "transport": instance.transport,
            "request_plane_url": f"dyn://{path}",
            "routes": [],
        }
        async with slots:
            try:
                async with asyncio.timeout(self._settings.request_seconds):
                    answer = await self._ask(path, instance.instance_id)
            except TimeoutError:
                return {**entry, "error": f"no answer within {self._settings.request_seconds:g} s"}
            except (DynamoException, OSError, ValueError) as error:  # the last: what a handler failed with
                return {**entry, "error": str(error) or type(error).__name__}
        if answer.get("status") == "error":
            return {**entry, "error": str(answer.get("message") or "the worker reported an error")}
        routes, url = answer.get("routes"), answer.get("system_url") or answer.get("base_url")
        entry["routes"] = routes if isinstance(routes, list) else []
        if url is not None:
            entry["system_url"] = url
        return {**entry, **{name: answer[name] for name in SHOWN if answer.get(name) is not None}}

    async def _ask(self, path: str, instance_id: int) -> Mapping[str, object]:
        """Return what a worker reports. Raises DynamoException."""
        client = await self._runtime.endpoint(path).client()
        try:
            stream = await client.direct(QUESTION, instance_id, annotated=False)
            async with aclosing(stream):
                async for item in stream:
                    if isinstance(item, Mapping):
                        return item
        finally:
            await client.close()
        raise Unknown("the worker did not answer with an object")


PATH: Final = "/v1/rl/workers"
CLOSE_SECONDS: Final = 1.0


class RlWorkers:
    """The route, as an ASGI application."""

    def __init__(self, directory: TrainerDirectory) -> None:
        self._directory = directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != PATH:
            await reply(send, 404, b"", content_type=None)
            return
        if scope["method"] not in ("GET", "HEAD"):
            await reply(send, 405, b"", content_type=None, extra=((b"allow", b"GET,HEAD"),))
            return
        status, body = 200, b""
        try:
            body = msgspec.json.encode(await self._directory.workers())
        except (DynamoException, OSError) as error:
            logger.warning("the workers for trainers cannot be listed: %s", error)
            status, body = 500, msgspec.json.encode({"error": "discovery_failed", "message": str(error)})
        await reply(send, status, body)


class RlPart(Part):
    """Lists the workers that a trainer may pause and give new weights."""

    name: ClassVar[str] = "rl"

    def __init__(self, kernel: Kernel, settings: RlSettings) -> None:
        self._kernel, self._settings = kernel, settings
        prefix = kernel.settings.namespace_prefix
        # As in 1.6.1: a frontend without a namespace serves all of them, and lists the workers of the usual one.
        namespace = kernel.settings.namespace or (DEFAULT_NAMESPACE if prefix is None else None)
        scope = RlScope(namespace, prefix)
        app = RlWorkers(TrainerDirectory(kernel.runtime, settings, scope))
        self._service = HttpService(
            app,
            AdminLimits.of(kernel.settings.limits),
            render=render_rejection,
            refused=kernel.pipeline.metrics.refused,
        )
        logger.info("RL worker discovery enabled at %s", PATH)

    async def start(self) -> None:
        settings, host = self._settings, self._settings.host or self._kernel.settings.http_host
        try:
            await self._service.listen_at(host, settings.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self._kernel.peers is not None:
                return  # another process of this frontend has it
            raise CannotConnect(
                f"the listener for trainers cannot listen on {host}:{settings.port} ({error.strerror or error}); "
                "set DYN_RL_PORT to a free port, or 0 for any"
            ) from error
        address = self._service.sockets[0].getsockname()
        logger.info("RL worker discovery listener started on http://%s:%d%s", address[0], address[1], PATH)

    async def aclose(self) -> None:
        await self._service.close(CLOSE_SECONDS)

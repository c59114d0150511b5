"""The routes of a trainer at a worker of vLLM: `POST /engine/NAME`, with the names and bodies of the native system's worker.

They are there with `--enable-rl`. A failure is an answer, too: `{"status": "error", "message": ...}`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from dynamo.engines.operations import error_body
from dynamo.errors import InvalidArgument
from dynamo.vllm.operations import PAUSE_MODES, Body, VllmOperations, member_of, text_member, unknown_field

MUST_PAUSE: Final = (
    "Worker must be paused via pause_generation() before updating weights. POST /engine/pause_generation does that"
)
NO_TENSORS: Final = (
    "update_weights_from_tensor is not implemented for vLLM: tensors do not travel in a JSON body; "
    "use update_weights_from_disk or update_weights_from_distributed"
)
KEPT_ADAPTERS: Final = "mode keep is not possible while requests with LoRA adapters run; use wait or abort"

Run = Callable[[Mapping[str, Any]], Awaitable[Body]]


class VllmTraining:
    """What a trainer does with one engine. On the event loop only."""

    def __init__(self, client: Any, operations: VllmOperations, abort: Callable[[str], Awaitable[None]]) -> None:
        """`client`: vLLM's `AsyncLLM`. `abort` ends a request by the id that its client gave it."""
        self._client, self._operations, self._abort = client, operations, abort

    def routes(self) -> dict[str, Callable[[object], Awaitable[Body]]]:
        """Return what answers at `/engine/NAME`, by name."""
        anything = None  # its other members are arguments of a method of vLLM's workers
        table: dict[str, tuple[Run, frozenset[str] | None]] = {
            "liveness_probe": (self._probe, frozenset()),
            "pause_generation": (self._pause, frozenset({"mode", "clear_cache"})),
            "resume_generation": (self._resume, frozenset()),
            "flush_cache": (self._flush, frozenset()),
            "abort_request": (self._abort_request, frozenset({"request_id"})),
            "get_weight_version": (self._get_version, frozenset()),
            "set_weight_version": (self._set_version, frozenset({"weight_version"})),
            "update_weights_from_disk": (
                self._update_from_disk, frozenset({"model_path", "weight_version", "engine_rpc"}),
            ),
            "update_weights_from_distributed": (self._update_from_group, anything),
            "update_weights_from_tensor": (self._update_from_tensor, anything),
            "init_weights_update_group": (partial(self._call_workers, "init_broadcaster"), anything),
            "destroy_weights_update_group": (partial(self._call_workers, "destroy_broadcaster"), anything),
        }  # fmt: skip
        return {name: partial(_answer, run, fields) for name, (run, fields) in table.items()}

    # -- the engine ---------------------------------------------------------------------------------------------------

    async def _probe(self, _body: Mapping[str, Any]) -> Body:
        return {"alive": not self._client.errored}

    async def _pause(self, body: Mapping[str, Any]) -> Body:
        mode, clears_cache = member_of(body, "mode", PAUSE_MODES, "keep"), _flag(body, "clear_cache", default=False)
        if mode == "keep" and self._operations.adapters.requests:
            raise InvalidArgument(KEPT_ADAPTERS)
        await self._operations.pause(mode, clears_cache=clears_cache)
        return {"message": "Engine paused", "mode": mode, "clear_cache": clears_cache}

    async def _resume(self, body: Mapping[str, Any]) -> Body:
        await self._operations.resume_generation(body)
        return {"message": "Engine resumed"}

    async def _flush(self, body: Mapping[str, Any]) -> Body:
        await self._operations.clear_kv_blocks(body)
        return {"message": "Cache flushed"}

    async def _abort_request(self, body: Mapping[str, Any]) -> Body:
        request_id = _needed(body, "request_id")
        await self._abort(request_id)
        return {"request_id": request_id}

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _get_version(self, _body: Mapping[str, Any]) -> Body:
        version = self._operations.weight_version
        return {"version": version, "version_declared": version is not None}

    async def _set_version(self, body: Mapping[str, Any]) -> Body:
        self._operations.weight_version = version = _needed(body, "weight_version")
        return {"version": version}

    async def _update_from_disk(self, body: Mapping[str, Any]) -> Body:
        if not self._operations.is_paused:
            raise InvalidArgument(MUST_PAUSE)
        await self._operations.update_weights(body, _method(body, "reload_weights"))
        return await self._get_version(body)

    async def _update_from_group(self, body: Mapping[str, Any]) -> Body:
        """Let vLLM's workers receive weights. An engine that computes meanwhile may keep its cache, and only then."""
        operations, rpc, version = (
            self._operations,
            _method(body, "update_weights_from_path"),
            text_member(body, "weight_version"),
        )
        goes_on, resets = _flag(body, "allow_unpaused", default=False), _flag(body, "reset_prefix_cache", default=True)
        own = {"engine_rpc", "weight_version", "allow_unpaused", "reset_prefix_cache"}
        async with operations.lock:
            if not operations.is_paused and not goes_on:
                raise InvalidArgument(MUST_PAUSE)
            if not operations.is_paused and resets:
                raise InvalidArgument("allow_unpaused needs reset_prefix_cache false: requests that run use the cache")
            await self._client.collective_rpc(
                rpc, kwargs={name: value for name, value in body.items() if name not in own}
            )
            if resets:
                await operations.forget_blocks()
            operations.weight_version = version
        return await self._get_version(body)

    async def _update_from_tensor(self, _body: Mapping[str, Any]) -> Body:
        raise InvalidArgument(NO_TENSORS)

    async def _call_workers(self, rpc: str, body: Mapping[str, Any]) -> Body:
        method = _method(body, rpc)
        async with self._operations.lock:
            await self._client.collective_rpc(
                method, kwargs={name: value for name, value in body.items() if name != "engine_rpc"}
            )
        return {}


async def _answer(run: Run, fields: frozenset[str] | None, body: object) -> Body:
    if not isinstance(body, dict):
        return error_body("request body must be a JSON object")
    if fields is not None and (refusal := unknown_field(body, fields)) is not None:
        return refusal
    try:
        return {"status": "ok", **await run(body)}
    except InvalidArgument as error:
        return error_body(str(error))
    except Exception as error:  # vLLM's own message names what is missing, such as the method of a worker extension
        return error_body(f"{type(error).__name__}: {error}")


def _needed(body: Mapping[str, Any], name: str) -> str:
    value = text_member(body, name)
    if not value:
        raise InvalidArgument(f"Missing required field: {name}")
    return value


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false, got {value!r}")
    return value


def _method(body: Mapping[str, Any], default: str) -> str:
    """Return the method of vLLM's workers that a body names; a private one cannot be called."""
    name = text_member(body, "engine_rpc") or default
    if not name.isidentifier() or name.startswith("_"):
        raise InvalidArgument(f"engine_rpc must be the name of a method, got {name!r}")
    return name

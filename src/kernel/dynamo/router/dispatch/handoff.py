"""What passes between a prefill worker and a decode worker: the requests of both halves, and the prefill worker's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal

from dynamo.errors import (
    DynamoException,
    StreamIncomplete,
    Unknown,
    revive,
)
from dynamo.placement.kv_transfer import TransferRule
from dynamo.protocol.finish import EngineFailed, normalise
from dynamo.protocol.worker_request import (
    BootstrapInfo,
    PrefillResult,
    RoutingHints,
    TaintPreferences,
    TokenLimits,
    WorkerRequest,
)
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Instance, ResponseStream, StreamItem

MAX_PORT: Final = 2**16 - 1
PEER_FAILURE_SECONDS: Final = 0.1  # a prefill worker whose process is gone is missed by both sides within milliseconds

_DECODE_OVERRIDES: Final = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}
"""What the decode worker is chosen by: the prompt's blocks come from elsewhere, so what it has cached counts nothing,
and it computes no prompt."""
_MEDIA: Final[tuple[Literal["multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "encoder_result"], ...]] = (
    "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "encoder_result",
)  # fmt: skip
_CACHED_COUNTS: Final = {"assume_kv_reuse": False, "track_prefill_tokens": False}


Renew = Callable[[], Awaitable[WorkerRequest | None]]
"""Makes a request anew that holds what one worker can take only; None: it was cancelled meanwhile."""


class PrefillAnswer:
    """The prefill worker ended the request itself (an end-of-sequence token came first): nothing is left to decode."""

    __slots__ = ("instance", "items")

    def __init__(self, instance: Instance, items: list[StreamItem]) -> None:
        """`items` is what the client gets; empty when its request was cancelled."""
        self.instance, self.items = instance, items


class Handoff:
    """A prompt that is computed, or being computed, and the request that continues it."""

    __slots__ = ("_running", "body", "instance", "transfer")

    def __init__(
        self,
        instance: Instance,
        body: WorkerRequest,
        running: asyncio.Task[None] | None = None,
        transfer: TransferRule | None = None,
    ) -> None:
        """`instance` computes the prompt; `body` is for the decode worker. `running`: the prefill, where it still runs.
        `transfer`: which decode workers the blocks can be sent to; None: all."""
        self.instance, self.body, self._running, self.transfer = instance, body, running, transfer

    @property
    def is_concurrent(self) -> bool:
        """Whether the prefill runs beside the decode: then the two of them meet once."""
        return self._running is not None

    @property
    def failure(self) -> DynamoException | None:
        """Why the prefill failed that ran beside the decode; None: it did not, or runs."""
        running = self._running
        if running is None or not running.done() or running.cancelled():
            return None
        error = running.exception()
        return error if isinstance(error, DynamoException) else None

    async def join_decode(self, first_items: Awaitable[list[StreamItem]]) -> list[StreamItem]:
        """Await the decode's first items. A failure of one half ends the other half, and is raised."""
        running = self._running
        if running is None:
            return await first_items
        decode = asyncio.ensure_future(first_items)
        try:
            await asyncio.wait({decode, running}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                running.result()  # raises why the prefill failed
            items = await decode
        except DynamoException as error:
            if (
                error.is_reported
            ):  # by a decode worker that lives: the fault may be the other half's, and show in a moment
                await asyncio.wait({running}, timeout=PEER_FAILURE_SECONDS)
            running.cancel()
            raise
        except BaseException:
            running.cancel()
            raise
        finally:
            if not decode.done():
                decode.cancel()
                await asyncio.wait({decode})
        return items  # the prefill ends by itself, and the router waits for it


class StageReply:
    """What an encode or prefill worker answered."""

    __slots__ = ("details", "encoder_result", "items", "link", "params", "reason", "role")

    def __init__(self, role: str) -> None:
        self.role = role  # as in "the prefill worker"
        self.items: list[StreamItem] = []
        self.reason: str | None = None
        self.params: object = None
        self.encoder_result: object = None
        self.details: object = None  # usage.prompt_tokens_details
        self.link: object = None  # of the prefill's span

    def add(self, item: StreamItem) -> None:
        """Take over one item. Raises the error that it may carry."""
        self.items.append(item)
        reason, extra = item.finish_reason, item.extra or {}
        if item.index < 0:  # from a bare endpoint handler
            if extra.get("event") == "error":
                raise revive(extra.get("error") or {"message": "; ".join(extra.get("comment") or ["unknown error"])})
            extra = extra.get("data") or {}
            if not isinstance(extra, dict):
                raise Unknown(f"the {self.role} worker sent {type(extra).__name__} where a chunk was expected")
            reason = extra.get("finish_reason")
        if (params := extra.get("disaggregated_params")) is not None:
            self.params = params
        if (encoded := extra.get("encoder_result")) is not None:
            self.encoder_result = encoded
        usage = extra.get("completion_usage")
        if isinstance(usage, dict) and (details := usage.get("prompt_tokens_details")) is not None:
            self.details = details
        self.link = extra.get("worker_trace_link") or self.link
        if reason is not None:
            try:
                self.reason = normalise(reason)
            except (EngineFailed, TypeError) as error:
                raise Unknown(str(error)) from error

    def handed_over(self) -> WorkerRequest:
        """Return the members of the decode request that this makes."""
        params = self.params
        members: WorkerRequest = {} if self.link is None else {"migration_link": self.link}
        if isinstance(params, dict) and (meeting := _bootstrap(params)) is not None:
            return {**members, "bootstrap_info": meeting}
        result: PrefillResult = {"disaggregated_params": params}
        if self.details is not None:
            result["prompt_tokens_details"] = self.details
        return {**members, "prefill_result": result}


async def read_reply(stream: ResponseStream, context: Context, role: str) -> StageReply:
    """Read the stream of an encode or prefill worker to its end; `role` is for error texts. Raises the error it ends with."""
    reply = StageReply(role)
    try:
        while reply.reason is None:
            items = await stream.next_batch()
            if not items:
                if context.is_stopped():
                    return reply
                raise StreamIncomplete(f"the {role} worker ended the stream without a finish reason")
            for item in items:
                reply.add(item)
        stream.finish()
    finally:
        stream.close()
    return reply


def prefill_request(body: WorkerRequest, instance_id: int) -> WorkerRequest:
    """Return the request that has the prompt of `body` computed."""
    routing: RoutingHints = {**(body.get("routing") or {}), "prefill_worker_id": instance_id}
    routing.pop("dp_rank", None)  # the decode worker's
    if (rank := routing.get("prefill_dp_rank")) is not None:
        routing["dp_rank"] = rank
    stops: TokenLimits = {**(body.get("stop_conditions") or {}), "max_tokens": 1}
    return {**body, "stop_conditions": stops, "routing": routing}


def decode_request(
    body: WorkerRequest,
    instance_id: int,
    members: WorkerRequest,
    transfer: TransferRule | None = None,
    *,
    counts_cached: bool = False,
) -> WorkerRequest:
    """Return the request that continues `body` behind its prefill; `members` name where the result is.

    The media stay behind: the prefill worker has taken them, and what they became is in its blocks.
    `transfer`: which decode workers it can be sent to; None: all. `counts_cached`: what a decode worker has cached counts
    all the same, as some prompts are computed there.
    """
    routing: RoutingHints = {**(body.get("routing") or {}), "prefill_worker_id": instance_id}
    if transfer is not None:
        routing["routing_constraints"] = _within(transfer, routing.get("routing_constraints") or {})
    override = {
        **(body.get("router_config_override") or {}),
        **(_CACHED_COUNTS if counts_cached else _DECODE_OVERRIDES),
    }
    onward: WorkerRequest = {**body, "routing": routing, "router_config_override": override, **members}
    if "multi_modal_data" in body:
        for name in _MEDIA:
            onward.pop(name, None)
    return onward


def _within(rule: TransferRule, given: TaintPreferences) -> TaintPreferences:
    """Return the constraints of a request with a rule added to those that are given."""
    if rule.is_required:
        return {**given, "required_taints": [*(given.get("required_taints") or ()), rule.taint]}
    return {**given, "preferred_taints": {**(given.get("preferred_taints") or {}), rule.taint: rule.weight}}


def _bootstrap(params: Mapping[str, object]) -> BootstrapInfo | None:
    """Return where the workers meet, if the parameters name it."""
    host, port, room = (params.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(room, int)):
        return None
    if not (0 <= port <= MAX_PORT and 0 <= room < 2**64):
        return None
    found: BootstrapInfo = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    if "handoff_id" in params:
        found["handoff_id"] = params["handoff_id"]  # type: ignore[typeddict-item]  # whatever the worker calls it
    return found

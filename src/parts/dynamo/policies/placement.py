"""The placement of the kv router mode where a policy of the user decides, or one decides in the shadow of another."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

import msgspec

from dynamo.errors import DynamoException
from dynamo.placement.kv_query import KvQuery, RequestOrigin
from dynamo.placement.kv_state import NO_MATCH, KvChoice, KvPolicy, Selection
from dynamo.policies.programmed import ProgrammedPolicy
from dynamo.policies.records import PolicyRequest
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.kv.placement import HashedPrompts, KvPlacement, OpenedWorker
from dynamo.router.kv.router import KvRouter
from dynamo.router.kv.sessions import session_id_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseStream
from dynamo.runtime.observe.metrics import Counter, Family, MetricsRegistry, Vector

logger = logging.getLogger(__name__)

FAILURES: Final = Family(
    "dynamo_component_router_policy_failures_total",
    "counter",
    "Decisions that a policy of the user did not make: it `raised` an error, `stalled` (was ended), returned what is `invalid`, or "
    "was `resting` after failures in a row. One that was `slow` did decide",
    ("policy", "kind"),
)
SHADOW: Final = Family(
    "dynamo_component_router_shadow_decisions_total",
    "counter",
    "Requests that a shadow policy decided, too, by whether it chose the `same` rank, `another` one, or `failed`",
    ("policy", "outcome"),
)
SHADOW_TOKENS: Final = Family(
    "dynamo_component_router_shadow_cached_tokens_total",
    "counter",
    "Cached prompt tokens where the shadow policy would have sent the requests",
    ("policy",),
)
FAMILIES: Final = (FAILURES, SHADOW, SHADOW_TOKENS)
OUTCOMES: Final = ("same", "another", "failed")


class Shadow:
    """A policy that decides beside the one in force: what it chooses is counted and recorded, and not done."""

    __slots__ = ("_outcomes", "_policy", "_reported", "_tokens")

    def __init__(self, policy: KvPolicy, registry: MetricsRegistry) -> None:
        self._policy = policy
        labels = {"policy": policy.name}
        outcomes = SHADOW.counters(registry, labels)
        self._outcomes = {outcome: outcomes.labels(outcome) for outcome in OUTCOMES}
        self._tokens = SHADOW_TOKENS.counter(registry, labels)
        self._reported = False

    def decide(self, selection: Selection) -> KvChoice | None:
        """Return what the policy would have chosen; None: it has failed."""
        try:
            return self._policy.choose(selection.state, selection.choice.draw)
        except DynamoException as error:  # it leaves no worker
            logger.debug("the shadow policy %s chose none: %s", self._policy.name, error)
        except Exception:
            if not self._reported:
                self._reported = True
                logger.exception("the shadow policy %s failed", self._policy.name)
        return None

    def count(self, selection: Selection) -> None:
        """Count a decision of a request that is sent to a worker."""
        shadow, state = selection.shadow, selection.state
        if shadow is None:
            self._outcomes["failed"].inc()
            return
        self._outcomes["same" if shadow.rank == selection.rank else "another"].inc()
        held = state.matches.get(shadow.position, NO_MATCH).overlap.device
        self._tokens.inc(min(state.request.prompt_tokens, held * state.block_size))


class ProgrammedPlacement(KvPlacement):
    """A `KvPlacement` whose policies know the origin of requests, may classify them, and may have a shadow."""

    __slots__ = ("_classifier", "_shadow")

    def __init__(
        self, router: KvRouter, registry: MetricsRegistry, shadow: KvPolicy | None = None, **more: Any
    ) -> None:
        """`shadow`: decides beside the router's policy. `more`: see `KvPlacement`."""
        super().__init__(router, **more)
        policy = router.policy
        for each in (policy, shadow):
            if isinstance(each, ProgrammedPolicy):
                failures = FAILURES.counters(registry, {"policy": each.name})
                each.report_to(partial(_count, failures))
        self._classifier = policy if isinstance(policy, ProgrammedPolicy) and policy.classifies else None
        self._shadow = None if shadow is None else Shadow(shadow, registry)

    @property
    def may_defer(self) -> bool:
        """Whether its policy has a method `classify`."""
        return self._classifier is not None

    async def query(
        self, body: WorkerRequest, record: HashedPrompts, *, pinned: int | None, is_prefill: bool = False
    ) -> KvQuery:
        """Return the query to the router for a request, with its origin. See `KvPlacement`."""
        query = await super().query(body, record, pinned=pinned, is_prefill=is_prefill)
        query.origin = RequestOrigin(session_id_of(body), record.tenant, query.lora_name, query.priority)
        if self._classifier is not None and pinned is None and not is_prefill:
            self._classify(self._classifier, query)
        return query

    def _classify(self, policy: ProgrammedPolicy, query: KvQuery) -> None:
        origin, router = query.origin, self.current_router()
        assert origin is not None, "the caller has made it"
        request = PolicyRequest(
            prompt_tokens=query.prompt_tokens or 0,
            block_size=router.block_size,
            expected_output=query.expected_output,
            session_id=origin.session_id,
            tenant=origin.tenant,
            lora_name=origin.lora_name,
            priority=origin.priority,
        )
        found = policy.classify(request, router.records())
        if found is None:
            return
        query.defer_seconds = found.defer_seconds
        if found.priority is not None:
            query.priority = found.priority
        if found.due_ms is not None:
            query.aim.target_ms = found.due_ms
        if found.worker_id is not None:
            query.origin = msgspec.structs.replace(origin, suggested_worker_id=found.worker_id)

    def select(self, query: KvQuery, now: float) -> Selection:
        """Decide, and have the shadow decide, too. See `KvPlacement`."""
        selection = super().select(query, now)
        if self._shadow is None:
            return selection
        return msgspec.structs.replace(selection, shadow=self._shadow.decide(selection))

    async def open(self, worker: OpenedWorker, body: WorkerRequest, context: Context) -> ResponseStream:
        """Book the decision behind `worker`, and open the stream there. See `KvPlacement`."""
        selection = getattr(worker.placement, "selection", None)
        if self._shadow is not None and selection is not None:
            self._shadow.count(selection)
        return await super().open(worker, body, context)


def _count(failures: Vector[Counter], kind: str) -> None:
    failures.labels(kind).inc()

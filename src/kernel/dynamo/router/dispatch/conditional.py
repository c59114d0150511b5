"""Conditional disaggregation: a prompt of which little is to be computed goes to a decode worker alone.

The decode worker is chosen first, as if the prefill workers did not exist. Where the rules leave them out, that worker gets
the request; nothing is booked by the question.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dynamo.errors import DynamoException
from dynamo.placement import PlacementRequest
from dynamo.placement.kv_state import RankState
from dynamo.placement.prefill_bypass import BypassFacts, BypassRules, judge_bypass
from dynamo.protocol.worker_request import WorkerRequest
from dynamo.router.dispatch.prefill import CanReceive, PrefillRouter
from dynamo.router.dispatch.record import DispatchRecord
from dynamo.router.kv.placement import KvPlaced
from dynamo.router.workers.pool import ChosenWorker, ModelPool
from dynamo.settings.readers import SettingReader, switch
from dynamo.settings.table import setting

logger = logging.getLogger(__name__)

BYPASS_MARKER: Final = "x-bypass-remote-prefill"
"""The annotation that has a decode worker compute the prompt; clients cannot set it."""

MAX_FILE_BYTES: Final = 64 * 1024
_GROUP: Final = "kv router"


def read_rules(given: str) -> BypassRules:
    """Read a JSON object, or a file with one in JSON or YAML. Raises ValueError that names the member."""
    if not given.lstrip().startswith("{"):
        try:
            with Path(given).open(encoding="utf-8") as file:
                given = file.read(MAX_FILE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"neither a JSON object nor a file that can be read: {error}") from None
    try:
        found: BypassRules = msgspec.yaml.decode(given, type=BypassRules)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    return found


def _shown(rules: object) -> str:
    return msgspec.json.encode(rules).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalSettings:
    """Whether prompts of a disaggregated model may be computed where they are decoded."""

    # fmt: off
    is_on: bool = setting(False, "DYN_ROUTER_CONDITIONAL_DISAGG", switch,
        "A prompt of which little is to be computed goes to the decode worker alone "
        "([disaggregation](disaggregation.md#conditional-disaggregation)). Needs `--router-mode kv` with KV events",
        flag="--router-conditional-disagg", group=_GROUP)
    rules: BypassRules = setting(BypassRules(), "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
        SettingReader(read_rules, show=_shown, metavar="JSON|FILE"),
        "What is little: a JSON object, or a file of JSON or YAML", flag="--router-conditional-disagg-config",
        group=_GROUP, shown="")
    # fmt: on


class Bypass(NamedTuple):
    """A request that goes to a decode worker alone."""

    body: WorkerRequest
    worker: ChosenWorker


class ConditionalPrefill:
    """Decides for one model which of its prompts are computed where they are decoded."""

    __slots__ = ("_decoders", "_prefill", "_rules")

    def __init__(self, rules: BypassRules, prefill: PrefillRouter, decoders: ModelPool) -> None:
        self._rules, self._prefill, self._decoders = rules, prefill, decoders

    async def decide(
        self, body: WorkerRequest, record: DispatchRecord, request: PlacementRequest, can_receive: CanReceive
    ) -> Bypass | None:
        """Return the request for the decode worker alone; None: its prompt goes to a prefill worker.

        `request`: what the choice of the decode worker may use. The verdict is noted in `record`. A decision that cannot
        be made is not an error: the prompt goes to a prefill worker.
        """
        kv = self._decoders.kv
        routing = body.get("routing") or {}
        if kv is None or not body.get("token_ids") or routing.get("prefill_worker_id") is not None:
            return None
        try:
            query = await kv.query(body, record, pinned=request.pinned_instance_id)
            worker = self._decoders.choose(msgspec.structs.replace(request, kv=query))
            placement = worker.placement
            if not isinstance(placement, KvPlaced):
                return None  # nothing is known of these workers yet
            prefill = None
            if self._rules.looks_at_prefill:
                prefill = _state_of(await self._prefill.peek(body, record, can_receive))
        except DynamoException as error:
            logger.warning(
                "cannot decide whether a prompt of model %s needs a prefill worker, so one gets it (%s: %s)",
                self._decoders.name,
                type(error).__name__,
                error,
            )
            return None
        selection, state = placement.selection, _state_of(worker)
        facts = BypassFacts(
            selection.lookup.prompt_tokens,
            selection.cached_tokens,
            selection.potential_decode_blocks,
            None if state is None else state.total_kv_blocks,
            0 if prefill is None else prefill.prefill_tokens,
            None if prefill is None else prefill.max_num_batched_tokens,
        )
        record.bypass = verdict = judge_bypass(self._rules, facts, worker.instance.instance_id)
        if not verdict.bypasses:
            return None
        return Bypass({**body, "annotations": [*(body.get("annotations") or ()), BYPASS_MARKER]}, worker)


def _state_of(worker: ChosenWorker) -> RankState | None:
    """Return the load of the rank that was chosen; None where the choice did not use it."""
    placement = worker.placement
    if not isinstance(placement, KvPlaced):
        return None
    selection = placement.selection
    return selection.state.ranks[selection.choice.position]

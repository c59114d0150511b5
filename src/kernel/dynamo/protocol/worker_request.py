"""The request that goes to a worker, as far as the way there reads it. Every other member passes through."""

from __future__ import annotations

from typing import TypedDict
from uuid import UUID


class TokenLimits(TypedDict, total=False):
    """Of `stop_conditions`: how many tokens may and must be generated; None: unset."""

    max_tokens: int | None
    min_tokens: int | None


class GuidanceOptions(TypedDict, total=False):
    """Of `sampling_options`: what the answer is guided by; None: nothing."""

    guided_decoding: dict[str, object] | None


class TaintPreferences(TypedDict, total=False):
    """Which taints a worker must have, and which ones count for it, with their weights."""

    required_taints: list[str]
    preferred_taints: dict[str, float]


class RoutingHints(TypedDict, total=False):
    """What a request sets about where it should be served. Absent: it may go anywhere."""

    backend_instance_id: int
    decode_worker_id: int
    prefill_worker_id: int
    dp_rank: int
    prefill_dp_rank: int
    lora_name: str
    cache_salt: str
    priority: int
    priority_jump: float
    strict_priority: int
    expected_output_tokens: int
    routing_constraints: TaintPreferences


class BootstrapInfo(TypedDict, total=False):
    """Where the two workers of a disaggregated request meet."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    handoff_id: UUID | str  # written by each plane as its readers need it


class PrefillResult(TypedDict, total=False):
    """What a prefill worker handed over; the transfer is the engines' own business."""

    disaggregated_params: object
    prompt_tokens_details: object


class WorkerRequest(TypedDict, total=False):
    """One request for one choice. A group of members may be None."""

    model: str
    token_ids: list[int]
    stop_conditions: TokenLimits | None
    sampling_options: GuidanceOptions | None
    routing: RoutingHints | None
    router_config_override: dict[str, object] | None
    bootstrap_info: BootstrapInfo
    prefill_result: PrefillResult
    agent_context: dict[str, object]
    migration_link: object  # of the span of the encode or prefill worker before it
    multi_modal_data: dict[str, list[object]]  # the slots of each kind of media, in the order of the message
    multi_modal_uuids: dict[str, list[object]]
    mm_processor_kwargs: dict[str, object]
    encoder_result: dict[str, object]  # what an encode worker made of the media; the engines' own business
    annotations: list[str]

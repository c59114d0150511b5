"""The request that goes to a worker: as a frontend plans it, and as it travels.

`PlannedRequest` is a record that the frontend fills in; `for_prompt` writes it down once, for each choice. `WorkerRequest` is what is
written, as far as the way to the worker reads it: every other member passes through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import asdict


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
    slo_ttft_ms: int
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
    output_options: dict[str, object]
    routing: RoutingHints | None
    router_config_override: dict[str, object] | None
    bootstrap_info: BootstrapInfo
    prefill_result: PrefillResult
    agent_context: dict[str, object]
    image_cache_scope: str  # of a session or agent: requests with the same one may share what was made of their images
    migration_link: object  # of the span of the encode or prefill worker before it
    multi_modal_data: dict[str, list[object]]  # the slots of each kind of media, in the order of the message
    multi_modal_uuids: dict[str, list[object]]
    mm_processor_kwargs: dict[str, object]
    encoder_result: dict[str, object]  # what an encode worker made of the media; the engines' own business
    annotations: list[str]


class StopFields(Struct):
    """When a choice ends; None: unset. The members have the names and the order of the wire, as those of the next two groups."""

    max_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class SamplingFields(Struct):
    """How tokens are drawn; None: unset."""

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: dict[str, Any] | None = None


class OutputFields(Struct):
    """What is reported of tokens; None: unset."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class PlannedRequest(Struct):
    """A worker's request but for its prompt."""

    stop_conditions: StopFields = field(default_factory=StopFields)
    sampling_options: SamplingFields = field(default_factory=SamplingFields)
    output_options: OutputFields = field(default_factory=OutputFields)
    annotations: Sequence[str] = ()
    routing: RoutingHints = field(default_factory=RoutingHints)
    router: Mapping[str, Any] | None = None  # the client's settings of the router
    prompt_embeds: str | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    request_timestamp_ms: float | None = None
    extra_args: dict[str, Any] | None = None  # for engines that have no member of their own
    media_io_kwargs: Mapping[str, Any] | None = None
    eos_token_ids: Sequence[int] = ()
    model: str = ""
    mdc_sum: str = ""  # of the model's card
    agent_context: dict[str, object] | None = None
    image_cache_scope: str | None = None
    requires_reasoning: bool = False  # guidance waits until the engine has reasoned
    media: Mapping[str, Any] = field(default_factory=dict)  # further members, of a request with media

    def for_prompt(self, token_ids: Sequence[int], choice: int = 0) -> WorkerRequest:
        """Write the request for one choice of a prompt. Each has a seed of its own, as equal seeds give equal texts."""
        sampling = asdict(self.sampling_options)
        if choice and self.sampling_options.seed is not None:
            sampling["seed"] = self.sampling_options.seed + choice
        written = {
            "stop_conditions": asdict(self.stop_conditions),
            "sampling_options": sampling,
            "output_options": asdict(self.output_options),
            "annotations": self.annotations,
            "routing": self.routing,
            "router_config_override": None,
            "router": self.router,
            "prompt_embeds": self.prompt_embeds,
            "mm_processor_kwargs": self.mm_processor_kwargs,
            "request_timestamp_ms": self.request_timestamp_ms,
            "extra_args": self.extra_args,
            **({} if self.media_io_kwargs is None else {"media_io_kwargs": self.media_io_kwargs}),
            "eos_token_ids": self.eos_token_ids,
            "model": self.model,
            "mdc_sum": self.mdc_sum,
            **({} if self.agent_context is None else {"agent_context": self.agent_context}),
            **({} if self.image_cache_scope is None else {"image_cache_scope": self.image_cache_scope}),
            **({"require_reasoning": True} if self.requires_reasoning else {}),
            **self.media,
            "token_ids": token_ids,
        }
        return cast(WorkerRequest, written)

"""What a token engine receives and what it yields: plain dicts with known keys, and short ways to build them."""

# No `from __future__ import annotations` here: it would hide `Required` from code that reads these types at run time.
from collections.abc import Mapping
from typing import Any, Required, TypedDict

RawRequest = dict[str, Any]
"""The OpenAI-shaped body that a `RawEngine` receives."""

RawResponseChunk = dict[str, Any]
"""One JSON-serialisable object that a `RawEngine` yields; it reaches the client verbatim."""


class StopConditions(TypedDict, total=False):
    """When generation ends. Every member may be None, so read with `.get(key) or default`."""

    max_tokens: int | None  # the engine must enforce it: nothing behind it clips
    min_tokens: int | None  # neither EOS nor a stop may end generation before this many tokens
    stop: list[str] | None  # stop strings; the frontend matches them
    stop_token_ids: list[int] | None  # excluded from the output
    stop_token_ids_visible: list[int] | None  # included in the output
    stop_token_ids_hidden: list[int] | None  # the model's own EOS; excluded
    ignore_eos: bool | None  # true: the four lists above arrive empty
    max_thinking_tokens: int | None  # budget for reasoning tokens


class GuidedDecoding(TypedDict, total=False):
    """A constraint on the output; at most one of the first six is set."""

    json: dict[str, Any] | str | None
    regex: str
    choice: list[str]
    grammar: str  # EBNF
    whitespace_pattern: str
    structural_tag: dict[str, Any]
    backend: str  # a hint to engines with several implementations


class SamplingOptions(TypedDict, total=False):
    """How the next token is chosen. Every member may be None."""

    n: int | None
    best_of: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    temperature: float | None  # 0: greedy
    top_p: float | None  # (0, 1]
    top_k: int | None  # -1: all
    min_p: float | None  # [0, 1]
    use_beam_search: bool | None
    length_penalty: float | None
    seed: int | None  # signed 64-bit
    include_stop_str_in_output: bool | None
    guided_decoding: GuidedDecoding | None


class OutputOptions(TypedDict, total=False):
    """What is reported beside the tokens. Every member may be None."""

    logprobs: int | None  # top alternatives per token; 0: the chosen token only; None: off
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    formatted_prompt: bool | None
    return_tokens_as_token_ids: bool | None


class Routing(TypedDict, total=False):
    """What the router decided or received; unset members are absent."""

    backend_instance_id: int
    prefill_worker_id: int
    decode_worker_id: int
    dp_rank: int
    prefill_dp_rank: int
    expected_output_tokens: int
    lora_name: str
    cache_salt: str
    priority_jump: float  # seconds
    strict_priority: int
    priority: int
    allowed_worker_ids: list[int]
    routing_constraints: dict[str, Any]


class GenerateRequest(TypedDict, total=False):
    """One request, as `generate()` receives it. Only `token_ids` is certain; the groups and their members may be None.

    So `stop_conditions.get("max_tokens") or self.max_tokens` is right, and `.get("max_tokens", default)` is not.
    """

    token_ids: Required[list[int]]  # the prompt, unsigned 32-bit
    model: str  # as the client named it; "" on canaries
    stop_conditions: StopConditions
    sampling_options: SamplingOptions
    output_options: OutputOptions
    eos_token_ids: list[int]
    mdc_sum: str | None  # checksum of the model card the frontend used
    annotations: list[str]  # "name" or "key:value"
    routing: Routing
    router_config_override: dict[str, Any] | None
    prefill_result: dict[str, Any]  # decode role: {"disaggregated_params": ..., "prompt_tokens_details"?}
    bootstrap_info: dict[str, Any]  # {"bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id"?}
    encoder_result: dict[str, Any]
    multi_modal_data: dict[str, list[Any]]  # "image" | "video" | "audio" -> [{"Url"} | {"Decoded"} | {"UuidOnly"}]
    multi_modal_uuids: dict[str, list[str | None]]
    mm_processor_kwargs: dict[str, Any]
    media_io_kwargs: dict[str, Any]  # how to read media, set by the client
    mm_routing_info: dict[str, Any]  # for the router only
    prompt_embeds: str  # base64 tensor; takes the place of token_ids
    require_reasoning: bool  # guided decoding waits for the end of the reasoning phase
    extra_args: dict[str, Any]
    agent_context: dict[str, Any]
    request_timestamp_ms: float  # arrival, set by the client
    migration_link: dict[str, str]  # framework's own
    _HEALTH_CHECK: bool  # True on canaries, absent elsewhere


class CompletionUsage(TypedDict, total=False):
    """Token counts of one stream; the OpenAI shape."""

    prompt_tokens: Required[int]
    completion_tokens: Required[int]
    total_tokens: Required[int]
    prompt_tokens_details: dict[str, int] | None  # cached_tokens, audio_tokens
    completion_tokens_details: dict[str, int] | None


class TopLogprob(TypedDict, total=False):
    """One alternative at one position."""

    rank: int
    token_id: int
    token: str | None
    logprob: float
    bytes: list[int]


class GenerateChunk(TypedDict, total=False):
    """One step of a stream. The last chunk, and no other, has `finish_reason`. Unknown keys are ignored."""

    token_ids: Required[list[int]]  # the new tokens only; may be []
    index: Required[int]  # which choice
    finish_reason: str | dict[str, str] | None  # stop, eos, length, cancelled, content_filter, {"error": message}
    completion_usage: CompletionUsage  # terminal only; counts every token of the stream
    text: str  # set it to decode in the engine; the frontend then does not
    tokens: list[str | None]
    log_probs: list[float]  # one per token id
    top_logprobs: list[list[TopLogprob]]
    cum_log_probs: float
    stop_reason: str | int | None  # the user's stop string or token that fired
    disaggregated_params: dict[str, Any]  # prefill terminal: the engine's handoff to decode
    encoder_result: dict[str, Any]  # encode terminal: the engine's handoff
    engine_data: dict[str, Any]  # reaches the client as nvext.engine_data
    extra_args: dict[str, Any]
    output_type: str  # text, image, video, audio
    content_parts: list[dict[str, Any]]
    worker_trace_link: dict[str, str]  # framework's own
    routing_data: dict[str, Any]  # framework's own


def chunk(token_ids: list[int], index: int = 0) -> GenerateChunk:
    """Make a step in the middle of a stream: only the new token ids."""
    return {"token_ids": token_ids, "index": index}


def final_chunk(
    finish_reason: str,
    token_ids: list[int] | None = None,
    *,
    index: int = 0,
    usage: CompletionUsage | None = None,
    disaggregated_params: Mapping[str, Any] | None = None,
) -> GenerateChunk:
    """Make the last step. `token_ids` may hold the last tokens or nothing; `usage` counts the whole stream."""
    last: GenerateChunk = {"token_ids": token_ids or [], "index": index, "finish_reason": finish_reason}
    if usage is not None:
        last["completion_usage"] = usage
    if disaggregated_params is not None:
        last["disaggregated_params"] = dict(disaggregated_params)
    return last


def usage(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int | None = None) -> CompletionUsage:
    """Make the token counts, the total included. `cached_tokens` of the prompt came from the prefix cache."""
    counts: CompletionUsage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts

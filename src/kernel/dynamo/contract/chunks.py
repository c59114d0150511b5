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
    stop: list[str] | None  # stop strings; the frontend matches them and ends the stream
    stop_token_ids: list[int] | None  # excluded from the output
    stop_token_ids_visible: list[int] | None  # included in the output
    stop_token_ids_hidden: list[int] | None  # the model's own EOS; excluded
    ignore_eos: bool | None  # true: the four lists above arrive empty
    max_thinking_tokens: int | None  # budget for reasoning tokens


class GuidedDecoding(TypedDict, total=False):
    """A constraint on the output; at most one of the first six is set."""

    json: dict[str, Any] | str | None  # a JSON schema
    regex: str  # the whole output matches it
    choice: list[str]  # the output is one of them
    grammar: str  # EBNF
    whitespace_pattern: str  # what may stand between the tokens of JSON
    structural_tag: dict[str, Any]  # formats that begin at a tag, such as tool calls
    backend: str  # a hint to engines with several implementations


class SamplingOptions(TypedDict, total=False):
    """How the next token is chosen. Every member may be None."""

    n: int | None  # choices; the frontend sends a request for each of several
    best_of: int | None  # choices that are generated, of which `n` are kept
    presence_penalty: float | None  # subtracted from each token that was generated already
    frequency_penalty: float | None  # subtracted once for each time that a token was generated
    repetition_penalty: float | None  # divides; 1: none
    temperature: float | None  # 0: greedy
    top_p: float | None  # (0, 1]
    top_k: int | None  # -1: all
    min_p: float | None  # [0, 1], of the likeliest token's probability
    use_beam_search: bool | None  # in place of sampling
    length_penalty: float | None  # of beam search
    seed: int | None  # signed 64-bit
    include_stop_str_in_output: bool | None  # the frontend does it, for its own stop strings
    guided_decoding: GuidedDecoding | None  # absent or None: the output is free


class OutputOptions(TypedDict, total=False):
    """What is reported beside the tokens. Every member may be None."""

    logprobs: int | None  # top alternatives per token; 0: the chosen token only; None: off
    prompt_logprobs: int | None  # the same for the tokens of the prompt; they go into `engine_data`
    skip_special_tokens: bool | None  # of an engine that detokenizes; the frontend does it else
    formatted_prompt: bool | None  # the prompt as text goes beside the answer
    return_tokens_as_token_ids: bool | None  # tokens are named by their ids in log probabilities


class Routing(TypedDict, total=False):
    """What the router decided or received; unset members are absent."""

    backend_instance_id: int  # the worker that must serve it
    prefill_worker_id: int  # the same for its prefill
    decode_worker_id: int  # the same for its decode
    dp_rank: int  # the data-parallel rank to take; an engine with several must obey
    prefill_dp_rank: int  # the rank that did the prefill
    expected_output_tokens: int  # what the router books
    lora_name: str  # the adapter to apply
    cache_salt: str  # requests with different ones share no cached block
    priority_jump: float  # seconds by which it overtakes others in a router's queue
    strict_priority: int  # a higher one goes first in a router's queue, whatever the priorities
    slo_ttft_ms: int  # its first token should be there within so many ms, by which a router's queue orders
    priority: int  # for the engine's own scheduler
    allowed_worker_ids: list[int]  # the only workers that may serve it
    routing_constraints: dict[str, Any]  # `required_taints`, `preferred_taints`


class GenerateRequest(TypedDict, total=False):
    """One request, as `generate()` receives it. Only `token_ids` is certain; the groups and their members may be None.

    So `stop_conditions.get("max_tokens") or self.max_tokens` is right, and `.get("max_tokens", default)` is not.
    """

    token_ids: Required[list[int]]  # the prompt, unsigned 32-bit
    model: str  # as the client named it; "" on canaries
    stop_conditions: StopConditions  # when generation ends
    sampling_options: SamplingOptions  # how tokens are chosen
    output_options: OutputOptions  # what is reported beside the tokens
    eos_token_ids: list[int]  # the model's own ends, for engines that do not know them
    mdc_sum: str | None  # checksum of the model card the frontend used
    annotations: list[str]  # "name" or "key:value"
    routing: Routing  # what the router decided
    router: dict[str, Any] | None  # `nvext.router`, as the client sent it; not for engines
    router_config_override: dict[str, Any] | None  # for a router in the worker's place: its settings for this request
    prefill_result: dict[str, Any]  # decode role: {"disaggregated_params": ..., "prompt_tokens_details"?}
    bootstrap_info: dict[str, Any]  # {"bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id"?}
    encoder_result: dict[str, Any]  # what an encode worker made of the media
    multi_modal_data: dict[str, list[Any]]  # "image" | "video" | "audio" -> [{"Url"} | {"Decoded"} | {"UuidOnly"}]
    multi_modal_uuids: dict[str, list[str | None]]  # the ids that clients gave their media, in the same order
    mm_processor_kwargs: dict[str, Any]  # for the model's own processor of media
    image_cache_scope: str  # requests with the same one may share what was made of their images
    media_io_kwargs: dict[str, Any]  # how to read media, set by the client
    mm_routing_info: dict[str, Any]  # for the router only
    prompt_embeds: str  # base64 tensor; takes the place of token_ids
    require_reasoning: bool  # guided decoding waits for the end of the reasoning phase
    extra_args: dict[str, Any]  # what has no member of its own: members of `nvext`, the native token routes
    agent_context: dict[str, Any]  # which session and step of an agent sent it
    request_timestamp_ms: float  # arrival, set by the client
    kv_hint: dict[str, Any]  # from which other worker the engine may fetch blocks of the prompt
    migration_link: dict[str, str]  # framework's own
    _HEALTH_CHECK: bool  # True on canaries, absent elsewhere


class CompletionUsage(TypedDict, total=False):
    """Token counts of one stream; the OpenAI shape."""

    prompt_tokens: Required[int]  # those of the prompt, cached ones included
    completion_tokens: Required[int]  # every token of the stream, hidden ones included
    total_tokens: Required[int]  # the sum
    prompt_tokens_details: dict[str, int] | None  # cached_tokens, audio_tokens
    completion_tokens_details: dict[str, int] | None  # reasoning_tokens; read of engines that answer with text


class TopLogprob(TypedDict, total=False):
    """One alternative at one position."""

    rank: int  # 1: the likeliest
    token_id: int  # the alternative
    token: str | None  # its text; without it the frontend decodes the id
    logprob: float  # natural logarithm
    bytes: list[int]  # of its text, in UTF-8


class GenerateChunk(TypedDict, total=False):
    """One step of a stream. The last chunk, and no other, has `finish_reason`. Unknown keys are ignored."""

    token_ids: Required[list[int]]  # the new tokens only; may be []
    index: Required[int]  # which choice
    finish_reason: str | dict[str, str] | None  # stop, eos, length, cancelled, content_filter, {"error": message}
    completion_usage: CompletionUsage  # terminal only; counts every token of the stream
    text: str  # set it to decode in the engine; the frontend then does not
    tokens: list[str | None]  # the text of each token id; for callers of the endpoint, no frontend shows it
    log_probs: list[float]  # one per token id
    top_logprobs: list[list[TopLogprob]]  # for each token id, the likeliest first
    cum_log_probs: float  # their sum since the stream began; for callers of the endpoint
    stop_reason: str | int | None  # the user's stop string or token that fired
    disaggregated_params: dict[str, Any]  # prefill terminal: the engine's handoff to decode
    encoder_result: dict[str, Any]  # encode terminal: the engine's handoff
    engine_data: dict[str, Any]  # reaches the client as nvext.engine_data, where its extra_fields name that
    extra_args: dict[str, Any]  # anything else; for callers of the endpoint
    output_type: str  # text, image, video, audio; for callers of the endpoint
    content_parts: list[dict[str, Any]]  # parts of a message; for callers of the endpoint
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

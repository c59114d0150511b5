"""From a validated request to the worker's fields besides the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec

from dynamo.protocol.openai.shapes import ChatRequest, CommonRequest, CompletionRequest, NvExt
from dynamo.protocol.openai.tool_schema import call_or_shape, forced_schema
from dynamo.protocol.worker_request import OutputFields, PlannedRequest, RoutingHints, SamplingFields, StopFields

# Events inside a frontend; every other annotation is the worker's, too, as in 1.6.1.
_INTERNAL_ANNOTATIONS: Final = frozenset({"llm_metrics", "payload_usage"})
_NEVER_FORWARDED: Final = "x-bypass-remote-prefill"  # only the router may set it
_QUERY_PREFIX: Final = "query_instance_id:"
_TRIGGERS: Final = {"user": "user_message", "tool": "tool_result"}
_SAMPLING: Final = (
    "logit_bias", "detokenize", "allowed_token_ids", "bad_words", "bad_words_token_ids", "logprob_token_ids", "suffix",
)  # fmt: skip
_NOTHING: Final = (None,) * len(_SAMPLING)


def to_worker_fields(
    request: CommonRequest,
    *,
    eos_token_ids: Sequence[int] = (),
    mdc_sum: str = "",
    lora_name: str | None = None,
    agent_context: dict[str, object] | None = None,
) -> PlannedRequest:
    """Return the worker's request without its prompt, a fresh record that the caller may change.

    `eos_token_ids`, `mdc_sum` and `lora_name` are those of the model. Its ends become hidden stops. With `ignore_eos` they are
    withheld and all four stop lists are cleared: the request runs to its token limit.
    """
    chat = request if isinstance(request, ChatRequest) else None
    completion = request if chat is None and isinstance(request, CompletionRequest) else None
    asked = completion if chat is None else chat
    nvext = request.nvext
    greedy = nvext is not None and nvext.greed_sampling is True
    stops = request.stop
    stop_strings: list[str] | None = None
    stop_ids = list(request.stop_token_ids) if request.stop_token_ids else None
    if isinstance(stops, str):
        stop_strings = [stops]
    elif stops:
        if isinstance(stops[0], int):
            stop_ids = [*(item for item in stops if isinstance(item, int)), *(stop_ids or ())]
        else:
            stop_strings = [item for item in stops if isinstance(item, str)]
    prompt_logprobs, max_tokens = request.prompt_logprobs, request.max_tokens
    if completion is not None and completion.echo:
        if completion.logprobs is not None:
            prompt_logprobs = max(prompt_logprobs or 0, completion.logprobs)
        if max_tokens == 0:
            max_tokens = 1  # no engine generates less; the token is dropped from the answer
    top_k = request.top_k
    salt = request.effective_cache_salt
    if request.cache_owner is not None:  # no other owner can name it
        salt = f"{request.cache_owner}\n{salt or ''}"
    if request.ignore_eos:
        stop_strings, stop_ids, eos_token_ids = None, None, ()
    return PlannedRequest(
        StopFields(
            chat.output_limit if chat is not None else max_tokens,
            stop_strings,
            stop_ids,
            stop_token_ids_hidden=list(eos_token_ids) or None,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            max_thinking_tokens=None if request.is_plain else _thinking_budget(chat, nvext),
        ),
        SamplingFields(
            request.n,
            completion.best_of if completion is not None else None,
            request.presence_penalty,
            request.frequency_penalty,
            request.repetition_penalty,
            None if greedy else request.temperature,
            None if greedy else request.top_p,
            -1 if top_k == 0 else top_k,
            request.min_p,
            seed=request.seed,
            include_stop_str_in_output=request.include_stop_str_in_output,
            guided_decoding=None if asked is None or request.is_plain else _guided_decoding(asked),
        ),
        OutputFields(
            None if asked is None else asked.requested_logprobs,
            prompt_logprobs,
            request.skip_special_tokens,
            return_tokens_as_token_ids=request.return_tokens_as_token_ids,
        ),
        [] if nvext is None else _worker_annotations(request.annotations),
        {} if request.is_plain and salt is None and lora_name is None else _routing(request, salt, lora_name),
        msgspec.to_builtins(nvext.router) if nvext is not None and nvext.router is not None else None,
        completion.prompt_embeds if completion is not None else None,
        chat.mm_processor_kwargs if chat is not None else None,
        nvext.request_timestamp_ms if nvext is not None else None,
        None if request.is_plain and salt is None else _extra_args(request, completion, salt),
        chat.media_io_kwargs if chat is not None else None,
        list(eos_token_ids),
        request.model,
        mdc_sum,
        agent_context,
    )


def input_trigger(request: CommonRequest) -> str:
    """Return why an agent calls the model, as 1.6.1 names it: for what the last message of a chat is."""
    if not isinstance(request, ChatRequest) or not request.messages:
        return "other"
    if request.ends_with_result:
        return "tool_result"
    return _TRIGGERS.get(str(request.messages[-1].get("role")), "other")


def _thinking_budget(chat: ChatRequest | None, nvext: NvExt | None) -> int | None:
    if nvext is not None and nvext.max_thinking_tokens is not None:
        return nvext.max_thinking_tokens
    if chat is None:
        return None
    if chat.thinking_token_budget is not None:
        return chat.thinking_token_budget
    return None if chat.thinking is None or isinstance(chat.thinking, bool) else chat.thinking.budget_tokens


def _guided_decoding(request: ChatRequest | CompletionRequest) -> dict[str, Any] | None:
    """Return the one requested kind of guidance, unset members left out.

    A forced tool choice beats `response_format`, and so does an explicit `guided_json`; both together were refused.
    """
    guidance, form = request.guidance, request.response_format
    chat = request if isinstance(request, ChatRequest) else None
    if not guidance and form is None and (chat is None or chat.tool_choice is None):
        return None
    guided = {kind: value for kind, (_, value) in guidance.items()}
    schema: Any = None if chat is None else forced_schema(chat)
    if schema is None and chat is not None and not guided and (shape := chat.shape_beside_calls) is not None:
        schema = call_or_shape(shape, chat.tools or (), only_one=chat.parallel_tool_calls is False)
    elif schema is None and form is not None:
        schema = form.shape
        if form.structural_tag is not None:
            guided.setdefault("structural_tag", form.structural_tag)
    if schema is not None and "json" not in guided:
        guided = {"json": schema, **guided}
    if not guided:
        return None
    if request.guided_decoding_backend is not None:
        guided["backend"] = request.guided_decoding_backend
    return guided


def _worker_annotations(annotations: Sequence[str]) -> list[str]:
    if not annotations:
        return []
    return [
        name
        for name in annotations
        if name not in _INTERNAL_ANNOTATIONS
        and not name.startswith(_QUERY_PREFIX)
        and name.partition(":")[0] != _NEVER_FORWARDED
    ]


def _routing(request: CommonRequest, salt: str | None, lora_name: str | None) -> RoutingHints:
    """Return the pins and hints for the router; `{}` for a request that may go anywhere."""
    nvext = request.nvext
    routing: dict[str, Any] = {}
    if nvext is None:
        if request.priority is not None:
            _set_priority(routing, request.priority)
    else:
        for name in ("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"):
            if (value := getattr(nvext, name)) is not None:
                routing[name] = value
        hints = nvext.agent_hints
        if hints is None or hints.priority is None:
            _set_priority(routing, request.priority)
        if hints is not None:
            if hints.osl is not None:
                routing["expected_output_tokens"] = hints.osl
            if hints.priority is not None:
                _set_priority(routing, hints.priority)
            elif hints.latency_sensitivity is not None and request.priority is None:
                routing["priority_jump"] = max(0.0, hints.latency_sensitivity)
            if hints.strict_priority is not None:
                routing["strict_priority"] = hints.strict_priority
        if nvext.slo_ttft_ms is not None:
            routing["slo_ttft_ms"] = nvext.slo_ttft_ms
        constraints = nvext.routing_constraints
        if constraints is not None:
            routing["routing_constraints"] = {
                "required_taints": constraints.required_taints or [],
                "preferred_taints": constraints.preferred_taints or {},
            }
    if salt is not None:
        routing["cache_salt"] = salt
    if lora_name is not None:
        routing["lora_name"] = lora_name
    return cast(RoutingHints, routing)


def _set_priority(routing: dict[str, Any], priority: int | None) -> None:
    if priority is not None:
        routing["priority"] = priority
        routing["priority_jump"] = float(max(0, priority))


def _extra_args(
    request: CommonRequest, completion: CompletionRequest | None, salt: str | None
) -> dict[str, Any] | None:
    """Return the fields for engines that have no member of their own; None when there are none."""
    given = (
        request.logit_bias, request.detokenize, request.allowed_token_ids, request.bad_words, request.bad_words_token_ids,
        request.logprob_token_ids, completion.suffix if completion is not None else None,
    )  # fmt: skip
    if given == _NOTHING and request.nvext is None and salt is None:
        return None  # as nearly every request
    sampling = {name: value for name, value in zip(_SAMPLING, given, strict=True) if value is not None}
    extension: dict[str, Any] = {}
    nvext = request.nvext
    if nvext is not None:
        if nvext.extra_fields:
            extension["extra_fields"] = nvext.extra_fields
        if nvext.metadata_upload is not None:
            extension["metadata_upload"] = {"url": nvext.metadata_upload.url}
        if request.token_data is not None:
            extension["token_in"] = True  # the client tokenised the prompt
    if salt is not None:
        extension["cache_salt"] = salt
    extra: dict[str, Any] = {}
    if extension:
        extra["nvext"] = extension
    if sampling:
        extra["sampling_options"] = sampling
    return extra or None

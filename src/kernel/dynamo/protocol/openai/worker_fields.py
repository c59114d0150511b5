"""From a validated request to the worker's fields besides the prompt.

Every member of the three option groups is present, None when unset: engines read them with `.get(...) or default`.
The prompt itself (`token_ids`), `eos_token_ids`, `mdc_sum` and `model` are the frontend's to add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dynamo.protocol.openai.shapes import ChatRequest, CommonRequest, CompletionRequest, NvExt
from dynamo.protocol.openai.tool_schema import call_or_shape, forced_schema

# Events inside a frontend; every other annotation is the worker's, too, as in 1.6.1.
_INTERNAL_ANNOTATIONS: Final = frozenset({"llm_metrics", "payload_usage"})
_NEVER_FORWARDED: Final = "x-bypass-remote-prefill"  # only the router may set it
_QUERY_PREFIX: Final = "query_instance_id:"


def to_worker_fields(request: CommonRequest) -> dict[str, Any]:
    """Return the worker request without its prompt, a fresh dict of plain values the caller may change."""
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
    return {
        "stop_conditions": {
            "max_tokens": chat.output_limit if chat is not None else max_tokens,
            "stop": stop_strings,
            "stop_token_ids": stop_ids,
            "stop_token_ids_visible": None,
            "stop_token_ids_hidden": None,
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
            "max_thinking_tokens": _thinking_budget(chat, nvext),
        },
        "sampling_options": {
            "n": request.n,
            "best_of": completion.best_of if completion is not None else None,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "repetition_penalty": request.repetition_penalty,
            "temperature": None if greedy else request.temperature,
            "top_p": None if greedy else request.top_p,
            "top_k": -1 if top_k == 0 else top_k,
            "min_p": request.min_p,
            "use_beam_search": None,
            "length_penalty": None,
            "seed": request.seed,
            "include_stop_str_in_output": request.include_stop_str_in_output,
            "guided_decoding": None if asked is None else _guided_decoding(asked),
        },
        "output_options": {
            "logprobs": None if asked is None else asked.requested_logprobs,
            "prompt_logprobs": prompt_logprobs,
            "skip_special_tokens": request.skip_special_tokens,
            "formatted_prompt": None,
            "return_tokens_as_token_ids": request.return_tokens_as_token_ids,
        },
        "annotations": _worker_annotations(request.annotations),
        "routing": _routing(request, salt),
        "router_config_override": None,
        "router": msgspec.to_builtins(nvext.router) if nvext is not None and nvext.router is not None else None,
        "prompt_embeds": completion.prompt_embeds if completion is not None else None,
        "mm_processor_kwargs": chat.mm_processor_kwargs if chat is not None else None,
        "request_timestamp_ms": nvext.request_timestamp_ms if nvext is not None else None,
        "extra_args": _extra_args(request, completion, salt),
        **({"media_io_kwargs": chat.media_io_kwargs} if chat is not None and chat.media_io_kwargs is not None else {}),
    }


def finish_preprocessing(fields: dict[str, Any], eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Add the model's end-of-sequence ids to `fields`, in place, and return it.

    They become hidden stops. With `ignore_eos` the ids are withheld and all four stop lists cleared: the request runs to
    its token limit.
    """
    stops = fields["stop_conditions"]
    if stops["ignore_eos"]:
        stops["stop"] = stops["stop_token_ids"] = None
        stops["stop_token_ids_visible"] = stops["stop_token_ids_hidden"] = None
        fields["eos_token_ids"] = []
    else:
        stops["stop_token_ids_hidden"] = list(eos_token_ids) or None
        fields["eos_token_ids"] = list(eos_token_ids)
    return fields


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


def _routing(request: CommonRequest, salt: str | None) -> dict[str, Any]:
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
        constraints = nvext.routing_constraints
        if constraints is not None:
            routing["routing_constraints"] = {
                "required_taints": constraints.required_taints or [],
                "preferred_taints": constraints.preferred_taints or {},
            }
    if salt is not None:
        routing["cache_salt"] = salt
    return routing


def _set_priority(routing: dict[str, Any], priority: int | None) -> None:
    if priority is not None:
        routing["priority"] = priority
        routing["priority_jump"] = float(max(0, priority))


def _extra_args(
    request: CommonRequest, completion: CompletionRequest | None, salt: str | None
) -> dict[str, Any] | None:
    """Return the fields for engines that have no member of their own; None when there are none."""
    sampling: dict[str, Any] = {
        "logit_bias": request.logit_bias,
        "detokenize": request.detokenize,
        "allowed_token_ids": request.allowed_token_ids,
        "bad_words": request.bad_words,
        "bad_words_token_ids": request.bad_words_token_ids,
        "logprob_token_ids": request.logprob_token_ids,
        "suffix": completion.suffix if completion is not None else None,
    }
    sampling = {name: value for name, value in sampling.items() if value is not None}
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

"""The body of vLLM's route of tokens as the request for a completion that it is, with what only its engine reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec import Struct

from dynamo.frontend.parts.token_routes.bodies import read_object
from dynamo.frontend.parts.token_routes.rejections import invalid
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.requests import validate_completion
from dynamo.protocol.openai.shapes import (
    I32,
    I64,
    U32,
    CompletionRequest,
    JsonObject,
    StreamOptions,
    StructuredOutputs,
)
from dynamo.protocol.openai.validation import check_prompt_scores
from dynamo.protocol.worker_request import PlannedRequest, WorkerRequest

I32_MAX: Final = 2**31 - 1
ENVELOPE: Final = "vllm_tito"
"""The member of `extra_args` with the request as vLLM itself takes it."""

TRANSFER: Final = "kv_transfer_params"


class VllmSampling(Struct, kw_only=True):
    """vLLM's sampling parameters, as far as they are checked here; all of them reach the engine."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: I64 | None = None
    min_p: float | None = None
    seed: I64 | None = None
    n: I64 | None = None
    max_tokens: U32 | None = None
    min_tokens: U32 | None = None
    thinking_token_budget: I64 | None = None
    logprobs: I64 | None = None
    prompt_logprobs: I64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[U32] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[U32] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[U32] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_reading_prefix_cache: bool | None = None
    vllm_xargs: JsonObject | None = None
    routed_experts_prompt_start: U32 | None = None


class VllmGenerateRequest(Struct, kw_only=True):
    """`POST /inference/v1/generate`. Members that are not listed reach the engine as they are."""

    token_ids: list[U32]
    sampling_params: VllmSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: I32 = 0
    kv_transfer_params: JsonObject | None = None


class LoweredGenerate(CompletionRequest, kw_only=True):
    """The completion that a request for tokens becomes."""

    # No annotations, so that they are no fields; see `CommonRequest`.
    sent = cast("JsonObject", {})  # the body
    named = cast("str | None", None)  # by its client, in the body
    answer_id = ""  # the `request_id` of the answer, once it is known
    urgency = 0  # as vLLM counts it: lower is sooner
    thinking_tokens = cast("int | None", None)  # at most


def decode_generate(body: bytes, limits: BodyLimits) -> LoweredGenerate:
    """Read a body, and hold it to the rules that need no model. Raises RequestRejected (400)."""
    found, sent, is_mended = read_object(body, VllmGenerateRequest, limits)
    sampling = found.sampling_params
    _check(found, sampling)
    wants_listed = bool(sampling.logprob_token_ids) and sampling.logprobs is None
    request = LoweredGenerate(
        model=found.model or "",
        prompt=[*found.token_ids],
        stream=found.stream,
        stream_options=found.stream_options,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n=sampling.n or None,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=0 if wants_listed else sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.stop if isinstance(sampling.stop, str) else [*(sampling.stop or ())] or None,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words or None,
        logprob_token_ids=sampling.logprob_token_ids,
        structured_outputs=sampling.structured_outputs,
        cache_salt=found.cache_salt,
        priority=min(-found.priority, I32_MAX) if found.priority else None,
    )
    request.sent, request.named, request.repaired = sent, found.request_id, is_mended
    request.urgency, request.thinking_tokens = found.priority, sampling.thinking_token_budget
    return request


def _check(found: VllmGenerateRequest, sampling: VllmSampling) -> None:
    """Refuse what breaks a rule, with the words of the native route."""
    least, most = sampling.min_tokens, sampling.max_tokens
    if not found.token_ids:
        raise invalid("token_ids must contain at least one token ID.", "token_ids")
    if most == 0:
        raise invalid("sampling_params.max_tokens must be greater than 0.", "sampling_params.max_tokens")
    if least is not None and most is not None and least > most:
        text = f"sampling_params.min_tokens ({least}) exceeds max_tokens ({most})."
        raise invalid(text, "sampling_params.min_tokens")
    if sampling.prompt_logprobs is not None and sampling.prompt_logprobs < -1:
        text = "sampling_params.prompt_logprobs must be non-negative or -1."
        raise invalid(text, "sampling_params.prompt_logprobs")
    if found.stream_options is not None and found.stream is not True:
        raise invalid("stream_options are only supported when stream=true.", "stream_options")
    if sampling.temperature is not None and not 0 <= sampling.temperature <= 2:
        text = f"Temperature must be between 0 and 2, got {sampling.temperature:g}"
        raise invalid(text, "sampling_params.temperature")
    if sampling.top_p is not None and not 0 <= sampling.top_p <= 1:
        raise invalid(f"Top_p must be between 0 and 1, got {sampling.top_p:g}", "sampling_params.top_p")


def validate_generate(request: LoweredGenerate) -> None:
    """Hold a request, whose model is known, to the rules of every completion, and to the bounds of an answer.

    Raises RequestRejected (400).
    """
    try:
        validate_completion(request)
        if request.prompt_logprobs is not None:
            check_prompt_scores(max(1, request.prompt_logprobs), request.choices_per_prompt * len(request.prompt))
    except RequestRejected as rejected:
        rejected.param = f"sampling_params.{rejected.param}" if rejected.param else None
        raise


class TokenRequest(PlannedRequest):
    """A worker's request with vLLM's own beside it."""

    def for_prompt(self, token_ids: Sequence[int], choice: int = 0) -> WorkerRequest:
        written, extra = super().for_prompt(token_ids, choice), self.extra_args
        assert extra is not None
        sampling = extra[ENVELOPE]["sampling_params"]
        if choice and sampling.get("seed") is not None:  # equal seeds give equal tokens
            own = {**extra[ENVELOPE], "sampling_params": {**sampling, "seed": sampling["seed"] + choice}}
            cast("dict[str, object]", written)["extra_args"] = {**extra, ENVELOPE: own}
        return written


def with_envelope(fields: PlannedRequest, request: LoweredGenerate) -> TokenRequest:
    """Return the worker's request: what every engine reads, and the request as vLLM takes it."""
    sent, stops = request.sent, fields.stop_conditions
    sampling = dict(sent["sampling_params"])
    if request.choices_per_prompt > 1:
        sampling["n"] = 1  # each choice is a request of its own
    known = (
        "request_id",
        "sampling_params",
        "model",
        "stream",
        "cache_salt",
        "priority",
        "token_ids",
        "stream_options",
    )
    envelope = {
        "request_id": request.answer_id,
        "sampling_params": sampling,
        "model": request.model,
        "stream": request.is_streaming,
        "priority": request.urgency,
        **{name: value for name, value in sent.items() if name not in known},
    }
    if (salt := fields.routing.get("cache_salt")) is not None:
        envelope["cache_salt"] = salt
    extra = {**(fields.extra_args or {}), ENVELOPE: envelope}
    if sent.get(TRANSFER) is not None:
        extra[TRANSFER] = sent[TRANSFER]
    ends = stops.stop_token_ids_hidden or []
    stops.stop_token_ids_hidden = [*dict.fromkeys([*(request.stop_token_ids or ()), *ends])] or None
    if request.ignore_eos:  # which is about the model's ends, not about those of the request
        stops.stop_token_ids = request.stop_token_ids or None
        stops.stop = [request.stop] if isinstance(request.stop, str) else cast("Any", request.stop)
    if request.thinking_tokens is not None and request.thinking_tokens >= 0:
        stops.max_thinking_tokens = request.thinking_tokens
    fields.sampling_options.n = 1
    routing = fields.routing
    routing["priority"] = routing.get("priority", 0)
    routing["priority_jump"] = 0.0
    if request.max_tokens is not None:
        routing["expected_output_tokens"] = request.max_tokens
    members = {name: getattr(fields, name) for name in fields.__struct_fields__}
    return TokenRequest(**{**members, "eos_token_ids": (), "extra_args": extra})

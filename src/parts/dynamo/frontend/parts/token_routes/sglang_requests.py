"""The body of SGLang's route of tokens as the request that a worker gets. Pure."""

from __future__ import annotations

from typing import Final, cast

from msgspec import Struct

from dynamo.frontend.parts.token_routes.bodies import read_object
from dynamo.frontend.parts.token_routes.rejections import NotJson, NotTheType, SglangRejected, SglangUnfit
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.errors import NOT_BUILT_CODE
from dynamo.protocol.openai.requests import validate_completion
from dynamo.protocol.openai.shapes import I32, I64, U32, CompletionRequest, JsonObject
from dynamo.protocol.worker_request import PlannedRequest

ENVELOPE: Final = "sglang_tito"
"""The member of `extra_args` with the request as SGLang itself takes it."""

INTERNAL: Final = (
    "bootstrap_info", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
    "disaggregated_params", "disagg_prefill_dp_rank", "routed_dp_rank", "external_trace_header", "received_time",
)  # fmt: skip
"""Members by which the halves of a request find each other: no client may set them."""

UNARY: Final = "non-streaming SGLang generate requests are not implemented; set stream=true"


class SglangSampling(Struct, kw_only=True):
    """SGLang's sampling parameters, as far as they are read here; all of them reach the engine."""

    max_new_tokens: I64 | None = None
    min_new_tokens: U32 | None = None
    n: I64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: I64 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[U32] | None = None
    ignore_eos: bool | None = None
    sampling_seed: I64 | None = None


class SglangGenerateRequest(Struct, kw_only=True):
    """`POST /generate`. Members that are not listed reach the engine as they are."""

    input_ids: list[U32]
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    priority: I32 | None = None
    return_logprob: bool | None = None
    top_logprobs_num: U32 | None = None


class LoweredSglang(CompletionRequest, kw_only=True):
    """The request without a text that it becomes."""

    sent = cast("JsonObject", {})  # the body
    rid = cast("str | None", None)  # the client's name of it


def decode_sglang(body: bytes, limits: BodyLimits) -> LoweredSglang:
    """Read a body, and hold it to the rules of the native route, in its order. Raises RequestRejected."""
    try:
        found, sent, is_mended = read_object(body, SglangGenerateRequest, limits)
    except (NotJson, NotTheType) as rejected:
        raise SglangUnfit(400, rejected.as_type(), param=rejected.param) from rejected
    sampling = found.sampling_params or SglangSampling()
    _check(found, sampling, sent)
    request = LoweredSglang(
        model="",
        prompt=[*found.input_ids],
        stream=True,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.stop if isinstance(sampling.stop, str) else [*(sampling.stop or ())] or None,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.sampling_seed,
        logprobs=(found.top_logprobs_num or 0) if found.return_logprob is True else None,
        return_tokens_as_token_ids=True,
        priority=found.priority,
    )
    request.sent, request.rid, request.repaired = sent, found.rid, is_mended
    return request


def _check(found: SglangGenerateRequest, sampling: SglangSampling, sent: JsonObject) -> None:
    if not found.input_ids:
        raise SglangRejected(400, "input_ids cannot be empty.", param="input_ids")
    if sampling.n not in (None, 1):
        text = "sampling_params.n must be 1; parallel sampling is not supported."
        raise SglangRejected(400, text, param="sampling_params.n")
    most = sampling.max_new_tokens
    if most is not None and not 0 <= most < 2**32:
        text = f"sampling_params.max_new_tokens: invalid value: integer `{most}`, expected u32"
        raise SglangRejected(400, text, param="sampling_params.max_new_tokens")
    for name in INTERNAL:
        if name in sent:
            text = f"`{name}` is internal Dynamo routing state and cannot be set by clients"
            raise SglangRejected(400, text, param=name)
    if found.stream is not True:
        raise SglangRejected(501, UNARY, param="stream", code=NOT_BUILT_CODE)


def validate_sglang(request: LoweredSglang) -> None:
    """Hold a request, whose model is known, to the rules of every completion. Raises RequestRejected (400)."""
    validate_completion(request)


def with_sglang_envelope(fields: PlannedRequest, request: LoweredSglang) -> PlannedRequest:
    """Return the worker's request: what every engine reads, and the request as SGLang takes it."""
    envelope = {"sampling_params": None, **request.sent, "rid": request.rid, "stream": True}
    del envelope["input_ids"]
    fields.extra_args = {**(fields.extra_args or {}), ENVELOPE: envelope}
    fields.sampling_options.n = 1
    priority = request.priority or 0
    fields.routing["priority"] = fields.routing.get("priority", priority)
    fields.routing["priority_jump"] = fields.routing.get("priority_jump", float(max(0, priority)))
    if request.max_tokens is not None:
        fields.routing["expected_output_tokens"] = request.max_tokens
    return fields

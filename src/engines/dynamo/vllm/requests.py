"""From the contract's request to the arguments of `AsyncLLM.generate`, and from vLLM's outputs to chunks of the contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dynamo.contract.engine import CompletionUsage, GenerateChunk, GenerateRequest, usage
from dynamo.contract.requests.dp_rank import forced_dp_rank, validate_global_dp_rank
from dynamo.contract.requests.logprobs import (
    extract_from_completion_output,
    extract_prompt_logprobs_from_completion_output,
    parse_logprob_options,
)
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.contract.requests.token_ids import token_ids_to_list
from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.vllm.adapters import LoadedAdapter, VllmAdapters
from dynamo.vllm.roles import TRANSFER, VllmRole

# From the contract's request to the arguments of vLLM's `SamplingParams`. No vLLM here: plain values in and out.

# Fields that would change the answer, so that ignoring them would be a lie.
UNSUPPORTED: Final = {
    "prompt_embeds": "embeddings in place of tokens are",
    "multi_modal_data": "images, audio and video are",
    "encoder_result": "images, audio and video are",
    "bootstrap_info": "connectors of which both halves run at once are",
}
SAME_NAME: Final = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
)
ENVELOPE: Final = "vllm_tito"
"""The member of `extra_args` with a request of vLLM's route of tokens as its client sent it."""

ENVELOPE_SERVED: Final = frozenset(
    {
        *SAME_NAME, "n", "max_tokens", "min_tokens", "thinking_token_budget", "logprobs", "prompt_logprobs", "stop",
        "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids",
        "structured_outputs", "skip_reading_prefix_cache", "vllm_xargs", "detokenize", "skip_special_tokens",
    }
)  # fmt: skip
"""Its sampling parameters that are served: as options of any request, by the frontend, or as vLLM's own."""

CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """What the engine holds a request to."""

    context_length: int
    vocab_size: int
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the model's own, from its generation_config.json


def read_sampling(request: Mapping[str, Any], limits: VllmLimits) -> dict[str, Any]:
    """Return keyword arguments of `SamplingParams`, without constraint and output kind.

    Raises InvalidArgument naming the field for what cannot be served; ranges are vLLM's to check.
    """
    for name, what in UNSUPPORTED.items():
        if request.get(name):
            raise InvalidArgument(f"{name} is set, but {what} not built for vLLM")
    options, stops = _group(request, "sampling_options"), _group(request, "stop_conditions")
    output, more = _group(request, "output_options"), _group(_group(request, "extra_args"), "sampling_options")
    choices = options.get("n") or 1
    if (options.get("best_of") or choices) != choices:
        raise InvalidArgument("sampling_options.best_of must equal n: vLLM returns all it generates")
    if options.get("use_beam_search"):
        raise InvalidArgument("sampling_options.use_beam_search is not built for vLLM")
    if more.get("suffix"):
        raise InvalidArgument("suffix is not built for vLLM")
    found = {name: value for name, value in limits.defaults.items() if name != "max_tokens"}
    found |= {name: options[name] for name in SAME_NAME if options.get(name) is not None}
    found["n"] = choices
    found |= _ends(request, stops, limits)
    logprobs, prompt_logprobs = parse_logprob_options(output)
    found |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    if more.get("logit_bias"):
        found["logit_bias"] = _bias(more["logit_bias"])
    if more.get("allowed_token_ids") is not None:
        found["allowed_token_ids"] = list(more["allowed_token_ids"])
    if more.get("logprob_token_ids"):
        found |= {"logprob_token_ids": list(more["logprob_token_ids"]), "logprobs": None}
    if more.get("bad_words"):
        found["bad_words"] = list(more["bad_words"])
    elif more.get("bad_words_token_ids"):
        raise InvalidArgument("bad_words_token_ids is not built for vLLM, which has no public way to take token ids")
    found |= _of_envelope(_envelope(request))
    return {name: value for name, value in found.items() if value is not None}


def _envelope(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request as vLLM's route of tokens got it; {} for one of another route."""
    return _group(_group(request, "extra_args"), ENVELOPE)


def _of_envelope(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only this route has. Raises InvalidArgument for a parameter that is not passed on."""
    if envelope.get("features"):
        raise InvalidArgument("features is set, but images, audio and video are not built for vLLM")
    sampling = _group(envelope, "sampling_params")
    for name, value in sampling.items():
        if value not in (None, False) and name not in ENVELOPE_SERVED:
            raise InvalidArgument(f"sampling_params.{name} is not built for vLLM")
    return {"skip_reading_prefix_cache": sampling.get("skip_reading_prefix_cache")}


def own_args(request: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `SamplingParams.extra_args`: what plugins of vLLM get, and its connector."""
    envelope = _envelope(request)
    given = _group(_group(envelope, "sampling_params"), "vllm_xargs")
    handed = envelope.get(TRANSFER) if transfer is None else transfer
    return {**given, **({} if handed is None else {TRANSFER: handed})} or None


def _ends(request: Mapping[str, Any], stops: Mapping[str, Any], limits: VllmLimits) -> dict[str, Any]:
    """Return what ends the answer. vLLM's own default for `max_tokens` is 16, so it is always set."""
    prompt = request.get("token_ids") or ()
    room = limits.context_length - len(prompt)
    if room < 1:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens; this model takes at most {limits.context_length - 1} "
            f"(a context of {limits.context_length}, one of them for the answer)"
        )
    asked = stops.get("max_tokens") or limits.defaults.get("max_tokens") or room
    ends: dict[str, Any] = {"max_tokens": min(asked, room), "min_tokens": stops.get("min_tokens") or 0}
    ids: dict[int, None] = {}  # in order, each once
    for name in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"):
        ids |= dict.fromkeys(stops.get(name) or ())
    ignore_eos = bool(stops.get("ignore_eos"))
    if not ignore_eos:
        ids |= dict.fromkeys(request.get("eos_token_ids") or ())
    ends |= {"ignore_eos": ignore_eos, "stop_token_ids": [one for one in ids if 0 <= one < limits.vocab_size]}
    if stops.get("max_thinking_tokens") is not None:
        ends["thinking_token_budget"] = stops["max_thinking_tokens"]
    return ends


def _bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"logit_bias must map token ids to numbers, got {value!r}") from error


def constraint_of(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return keyword arguments of `StructuredOutputsParams` for a guided request; None for any other."""
    guided = _group(request, "sampling_options").get("guided_decoding")
    if not guided:
        return None
    if not isinstance(guided, Mapping):
        raise InvalidArgument(f"sampling_options.guided_decoding must be an object, got {type(guided).__name__}")
    found = {name: guided[name] for name in CONSTRAINTS if guided.get(name) not in (None, "", [])}
    if not found:
        return None
    if len(found) > 1:
        raise InvalidArgument(f"guided_decoding holds {' and '.join(found)}; one constraint is possible")
    if "structural_tag" in found:  # vLLM takes it as text
        found["structural_tag"] = serialize_structural_tag(found["structural_tag"])
    if guided.get("whitespace_pattern"):
        found["whitespace_pattern"] = guided["whitespace_pattern"]
    return found


def _group(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = holder.get(name)
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{name} must be an object, got {type(values).__name__}")
    return values


SALT_PREFIX: Final = "dynamo-cache-salt:"  # salts come untagged in vLLM's KV events: this one is recognised


@dataclass(frozen=True, slots=True)
class Submission:
    """One request, as vLLM takes it."""

    prompt_tokens: int
    choices: int
    wants_logprobs: bool
    prompt: Any
    sampling: Any  # `SamplingParams`
    keywords: Mapping[str, Any]  # further ones of `AsyncLLM.generate`
    adapter: LoadedAdapter | None
    unwanted: str | None  # why the blocks of a prefill worker cannot be used, if so


class VllmSubmissions:
    """Reads the requests of one running engine."""

    def __init__(self, client: Any, config: Any, role: VllmRole, adapters: VllmAdapters) -> None:
        """`client`: vLLM's `AsyncLLM`. `config`: its `VllmConfig`."""
        model = config.model_config
        self._limits = VllmLimits(model.max_model_len, model.get_vocab_size(), model.get_diff_sampling_param())
        self._has_priorities = config.scheduler_config.policy == "priority"
        self._ranks = local_ranks(config)
        self._later = frozenset(inspect.signature(client.generate).parameters)  # what this release has
        self._role, self._adapters = role, adapters

    def read(self, request: GenerateRequest, transfer: dict[str, Any] | None) -> Submission:
        """Read a request; `transfer` is what vLLM's connector gets of it. Raises InvalidArgument naming the field."""
        prompt = token_ids_to_list(request["token_ids"])
        if not prompt:
            raise InvalidArgument("token_ids must not be empty")
        options = read_sampling(request, self._limits)
        self._role.adapt(options)
        unwanted = None if transfer is None else self._role.unwanted(options)
        return Submission(
            prompt_tokens=len(prompt),
            choices=options["n"],
            wants_logprobs="logprobs" in options or "logprob_token_ids" in options,
            prompt=self._prompt(prompt, request),
            sampling=self._sampling(options, request, None if unwanted else transfer),
            keywords=self._keywords(request),
            adapter=self._adapters.of(request),
            unwanted=unwanted,
        )

    def _prompt(self, prompt: list[int], request: GenerateRequest) -> Any:
        from vllm.inputs import tokens_input

        salt = (request.get("routing") or {}).get("cache_salt")
        return tokens_input(prompt, cache_salt=None if not salt else SALT_PREFIX + salt)

    def _sampling(self, options: dict[str, Any], request: GenerateRequest, transfer: dict[str, Any] | None) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        constraint = constraint_of(request) if self._role.draws_tokens else None
        guided = None if constraint is None else StructuredOutputsParams(**constraint)
        return SamplingParams(
            **options,
            structured_outputs=guided,
            extra_args=own_args(request, transfer),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )

    def _keywords(self, request: GenerateRequest) -> dict[str, Any]:
        routing = request.get("routing") or {}
        keywords: dict[str, Any] = {}
        if self._has_priorities:
            keywords["priority"] = -(routing.get("priority") or 0)  # vLLM begins with the lowest
        rank = validate_global_dp_rank(forced_dp_rank(request), self._ranks.start, len(self._ranks), "vLLM")
        if rank is not None:
            keywords["data_parallel_rank"] = rank
        if "reasoning_ended" in self._later and not request.get("require_reasoning"):
            keywords["reasoning_ended"] = True  # a constraint holds from the first token on
        return keywords


def local_ranks(config: Any) -> range:
    """Return the data-parallel ranks of this worker. `config`: vLLM's `VllmConfig`."""
    parallel = config.parallel_config
    first = parallel.data_parallel_rank or 0
    return range(first, first + max(1, parallel.data_parallel_size_local or parallel.data_parallel_size))


# From vLLM's outputs to chunks of the contract.


class VllmAnswer:
    """One request's outputs, as they come: an output may hold no token, one or several."""

    __slots__ = (
        "_cached",
        "_choices_left",
        "_hand_over",
        "_prompt_logprobs",
        "_prompt_tokens",
        "_tokens",
        "_wants_logprobs",
    )

    def __init__(
        self,
        prompt_tokens: int,
        choices: int,
        *,
        wants_logprobs: bool,
        hand_over: Callable[[Any], dict[str, Any] | None] = lambda _output: None,
    ) -> None:
        """`hand_over`: what the last output has for a decode worker, if there is one."""
        self._prompt_tokens, self._choices_left = prompt_tokens, choices
        self._wants_logprobs, self._hand_over = wants_logprobs, hand_over
        self._tokens = 0
        self._cached: int | None = None
        self._prompt_logprobs: Any = None  # they come once, with an early output

    @property
    def is_complete(self) -> bool:
        """Whether every choice has had its last chunk."""
        return self._choices_left == 0

    def chunks(self, output: Any) -> Iterable[GenerateChunk]:
        """Return what one `RequestOutput` adds. Raises EngineShutdown for a request that the engine gave up."""
        parts = output.outputs
        if self._cached is not None and len(parts) == 1 and not self._wants_logprobs:
            part = parts[0]
            if part.finish_reason is None and part.token_ids and not output.prompt_logprobs:  # nearly every output
                ids = list(part.token_ids)
                self._tokens += len(ids)
                return ({"token_ids": ids, "index": part.index},)
        return self._all_chunks(output)

    def _all_chunks(self, output: Any) -> Iterator[GenerateChunk]:
        if output.num_cached_tokens is not None:
            self._cached = output.num_cached_tokens
        if output.prompt_logprobs:
            self._prompt_logprobs = extract_prompt_logprobs_from_completion_output(output)
        for part in output.outputs:
            ids = list(part.token_ids)
            self._tokens += len(ids)
            chunk: GenerateChunk = {"token_ids": ids, "index": part.index}
            if self._wants_logprobs and part.logprobs:
                self._add_logprobs(chunk, part)
            reason = part.finish_reason
            if reason is None:
                if ids:
                    yield chunk
                continue
            if reason in ("abort", "error"):  # its own doing: the KV transfer failed, or it was paused with an abort
                raise EngineShutdown(f"vLLM ended the request by itself ({reason})")
            self._choices_left -= 1
            chunk["finish_reason"] = "length" if reason == "length" else "stop"
            if part.stop_reason is not None:
                chunk["stop_reason"] = part.stop_reason
            if self._choices_left == 0:
                chunk["completion_usage"] = self.usage()
                if self._prompt_logprobs is not None:
                    chunk["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}
                if (handed_over := self._hand_over(output)) is not None:
                    chunk["disaggregated_params"] = handed_over
            yield chunk

    def _add_logprobs(self, chunk: GenerateChunk, part: Any) -> None:
        chosen, alternatives = extract_from_completion_output(part, 0)
        if chosen is not None:
            chunk["log_probs"] = chosen
        if alternatives is not None:
            chunk["top_logprobs"] = alternatives

    def cancelled(self) -> GenerateChunk:
        """Return the last chunk of a request that was cancelled."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self.usage()}

    def usage(self) -> CompletionUsage:
        return usage(self._prompt_tokens, self._tokens, cached_tokens=self._cached)

"""A token request in typed values, for engines that have their own samplers.

`read_generation` checks what every engine would check and names the field of a mistake. What an engine does not have it
declares (`unsupported`), so that a request that needs it is refused and never answered as if it did not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from dynamo.contract.requests.token_ids import token_ids_to_list
from dynamo.errors import InvalidArgument
from dynamo.protocol.guided_limits import DEFAULT_GUIDED_LIMITS, find_excess

ConstraintKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
KINDS: Final[tuple[ConstraintKind, ...]] = ("json", "regex", "choice", "grammar", "structural_tag")

Feature = Literal[
    "min_tokens", "stop_token_ids", "ignore_eos", "top_p", "top_k", "min_p", "penalties", "repetition_penalty", "seed",
    "logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "allowed_token_ids", "guided_decoding", "lora",
    "cache_salt", "reasoning",
]  # fmt: skip
"""What an engine may lack. `top_logprobs` are alternatives beside the chosen token; `reasoning` is a constraint that
holds after the thoughts."""

FEATURES: Final[frozenset[Feature]] = frozenset(Feature.__args__)  # type: ignore[attr-defined]

# Fields that would change the answer, so that ignoring them would be a lie.
NEVER: Final = {
    "prompt_embeds": "embeddings in place of tokens are",
    "multi_modal_data": "images, audio and video are",
    "encoder_result": "images, audio and video are",
    "bootstrap_info": "prefill and decode on different workers are",
    "prefill_result": "prefill and decode on different workers are",
}
I64: Final = 2**63
MAX_COUNT: Final = 2**31 - 1
MAX_BIAS: Final = 100.0
MAX_LOGPROBS: Final = 20  # OpenAI's bound
MAX_LISTED: Final = 1024  # entries of one list or map of a request


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What a request is held to, and what the engine has not."""

    engine: str  # as messages name it
    context_length: int  # tokens of prompt and answer together
    vocab_size: int
    unsupported: frozenset[Feature] = frozenset()
    # The model's sampling options, for what a request leaves open.
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What the answer must match."""

    kind: ConstraintKind
    value: Any  # json: the schema as an object or bool; choice: texts; structural_tag: an object; else text
    whitespace: str | None = None  # a regex for the blanks of JSON
    after_reasoning: bool = False  # the answer may begin with thoughts, and the constraint holds for what follows them


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for one answer. Every option has its value: the request's, else the model's, else the neutral one."""

    prompt: list[int]
    max_tokens: int  # at most what the context has room for
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]  # all that end the answer, the model's own end tokens included
    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # 0: all
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    logprobs: int | None  # alternatives per token; 0: the chosen token alone; None: off
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...] | None
    constraint: OutputConstraint | None
    lora_name: str | None
    cache_salt: str | None
    priority: int


def read_generation(request: Mapping[str, Any], limits: GenerationLimits) -> GenerationRequest:
    """Read a request. Raises InvalidArgument that names the field which is wrong or which this engine has not."""
    for name, what in NEVER.items():
        if request.get(name):
            raise InvalidArgument(f"{name} is set, but {what} not built for {limits.engine}")
    prompt = _prompt(request, limits)
    sampling, stops = _Options("sampling_options", request, limits), _Options("stop_conditions", request, limits)
    output, routing = _Options("output_options", request, limits), _Options("routing", request, limits)
    extra = request.get("extra_args")
    more = _Options("sampling_options", extra if isinstance(extra, Mapping) else {}, limits)
    _refuse_fixed(sampling, more, stops, limits)
    room = limits.context_length - len(prompt)
    defaults = limits.defaults
    ignores_eos = bool(stops.wanted("ignore_eos", "ignore_eos"))
    allowed = more.wanted("allowed_token_ids", "allowed_token_ids")
    most = stops.integer("max_tokens", 0, 0, MAX_COUNT) or defaults.get("max_tokens") or room
    least = stops.integer("min_tokens", 0, 0, MAX_COUNT, feature="min_tokens")
    if least > most:
        raise InvalidArgument(f"stop_conditions.min_tokens is {least}, which is above max_tokens ({most})")
    return GenerationRequest(
        prompt=prompt,
        max_tokens=min(most, room),
        min_tokens=least,
        ignore_eos=ignores_eos,
        stop_token_ids=_stop_ids(request, stops, limits, ignores_eos=ignores_eos),
        temperature=sampling.number("temperature", defaults.get("temperature", 1.0), 0.0, 100.0),
        top_p=sampling.number("top_p", defaults.get("top_p", 1.0), 0.0, 1.0, feature="top_p"),
        top_k=max(sampling.integer("top_k", defaults.get("top_k", 0), -1, MAX_COUNT, feature="top_k"), 0),
        min_p=sampling.number("min_p", defaults.get("min_p", 0.0), 0.0, 1.0, feature="min_p"),
        presence_penalty=sampling.number("presence_penalty", 0.0, -2.0, 2.0, feature="penalties"),
        frequency_penalty=sampling.number("frequency_penalty", 0.0, -2.0, 2.0, feature="penalties"),
        repetition_penalty=sampling.number(
            "repetition_penalty", defaults.get("repetition_penalty", 1.0), 0.0, 100.0, feature="repetition_penalty"
        ),
        seed=None if sampling.wanted("seed", "seed") is None else sampling.integer("seed", 0, -I64, I64 - 1),
        logprobs=_logprobs(output, "logprobs"),
        prompt_logprobs=_logprobs(output, "prompt_logprobs"),
        logit_bias=_bias(more, limits.vocab_size),
        allowed_token_ids=None if allowed is None else _token_ids("allowed_token_ids", allowed, limits.vocab_size),
        constraint=_constraint(sampling, request, limits),
        lora_name=routing.text("lora_name", "lora"),
        cache_salt=routing.text("cache_salt", "cache_salt"),
        priority=routing.integer("priority", 0, -MAX_COUNT, MAX_COUNT),
    )


def read_generation_defaults(directory: Path) -> dict[str, Any]:
    """Read the sampling options of a model from its `generation_config.json`; {} where there is none.

    Raises InvalidArgument for a file that is not a JSON object.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"{path} must hold a JSON object, got {type(values).__name__}")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: values[name] for name in names if isinstance(values.get(name), int | float)}
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


# -- parts ------------------------------------------------------------------------------------------------------------


class _Options:
    """One group of options; it and its members may be None."""

    def __init__(self, name: str, holder: Mapping[str, Any], limits: GenerationLimits) -> None:
        values = holder.get(name)
        if not (values is None or isinstance(values, Mapping)):
            raise InvalidArgument(f"{name} must be an object, got {type(values).__name__}")
        self.name, self._values, self._limits = name, values or {}, limits

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def wanted(self, name: str, feature: Feature | None, neutral: Any = None) -> Any:
        """Return a value. Raises InvalidArgument where it needs something that the engine does not have."""
        value = self.get(name)
        asks = value is not None and value is not False and value != neutral
        if asks and feature in self._limits.unsupported:
            raise InvalidArgument(f"{self.name}.{name} is set, which is not built for {self._limits.engine}")
        return value

    def integer(self, name: str, default: int, low: int, high: int, *, feature: Feature | None = None) -> int:
        value = self.wanted(name, feature, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidArgument(f"{self.name}.{name} must be an integer in {low}..{high}, got {value!r}")
        return value

    def number(self, name: str, default: float, low: float, high: float, *, feature: Feature | None = None) -> float:
        value = self.wanted(name, feature, default)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high:
            raise InvalidArgument(f"{self.name}.{name} must be a number in {low}..{high}, got {value!r}")
        return float(value)

    def text(self, name: str, feature: Feature) -> str | None:
        value = self.wanted(name, feature, "")
        if not (value is None or isinstance(value, str)):
            raise InvalidArgument(f"{self.name}.{name} must be a string, got {value!r}")
        return value or None


def _prompt(request: Mapping[str, Any], limits: GenerationLimits) -> list[int]:
    prompt: list[int] = token_ids_to_list(request["token_ids"])
    if not prompt:
        raise InvalidArgument("token_ids must not be empty")
    if len(prompt) >= limits.context_length:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens; this model takes at most {limits.context_length - 1} "
            f"(a context of {limits.context_length}, one of them for the answer)"
        )
    if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise InvalidArgument(f"token_ids holds {wrong}; this model knows 0 to {limits.vocab_size - 1}")
    return prompt


def _refuse_fixed(sampling: _Options, more: _Options, stops: _Options, limits: GenerationLimits) -> None:
    """Raise InvalidArgument for what no engine that is read this way has."""
    choices = sampling.integer("n", 1, 1, 128)
    if choices != 1 or sampling.integer("best_of", 1, 1, 128) != 1:
        raise InvalidArgument(f"sampling_options.n must be 1 for {limits.engine}: the frontend asks once per choice")
    for options, name in (
        (sampling, "use_beam_search"),
        (more, "suffix"),
        (more, "bad_words_token_ids"),
        (more, "logprob_token_ids"),
        (stops, "max_thinking_tokens"),
    ):
        if options.get(name):
            raise InvalidArgument(f"{options.name}.{name} is set, which is not built for {limits.engine}")


def _stop_ids(
    request: Mapping[str, Any], stops: _Options, limits: GenerationLimits, *, ignores_eos: bool
) -> tuple[int, ...]:
    """Return the ids that end the answer, each once. Ids that the model does not know can never come, and are dropped."""
    found: dict[int, None] = {}
    for name in ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"):
        feature: Feature | None = None if name == "stop_token_ids_hidden" else "stop_token_ids"
        found |= dict.fromkeys(_listed(f"stop_conditions.{name}", stops.wanted(name, feature, []) or ()))
    if not ignores_eos:
        found |= dict.fromkeys(_listed("eos_token_ids", request.get("eos_token_ids") or ()))
    return tuple(token for token in found if 0 <= token < limits.vocab_size)


def _listed(name: str, value: Any) -> Sequence[int]:
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise InvalidArgument(f"{name} must be a list of token ids, got {value!r}")
    if len(value) > MAX_LISTED:
        raise InvalidArgument(f"{name} has {len(value)} entries; at most {MAX_LISTED} are taken")
    return value


def _token_ids(name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or not all(type(token) is int for token in value):
        raise InvalidArgument(f"{name} must be a list of token ids, got {value!r}")
    if not 0 <= min(value) <= max(value) < vocab_size:
        raise InvalidArgument(f"{name} holds a token id that is not in 0..{vocab_size - 1}")
    return tuple(value)


def _logprobs(output: _Options, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    if output.wanted(name, name) is None:
        return None
    count = output.integer(name, 0, 0, MAX_LOGPROBS)
    if count:
        output.wanted(name, "top_logprobs", 0)
    return count


def _bias(more: _Options, vocab_size: int) -> Mapping[int, float]:
    """Read `logit_bias`: an object from token ids, which JSON writes as strings, to numbers."""
    value = more.wanted("logit_bias", "logit_bias", {}) or {}
    try:
        found = {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"logit_bias must map token ids to numbers, got {value!r}") from error
    if len(found) > MAX_LISTED:
        raise InvalidArgument(f"logit_bias has {len(found)} entries; at most {MAX_LISTED} are taken")
    for token, bias in found.items():
        if not 0 <= token < vocab_size:
            raise InvalidArgument(f"logit_bias holds the token {token}; this model knows 0 to {vocab_size - 1}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgument(f"logit_bias for token {token} must be between -100 and 100, got {bias}")
    return found


def _constraint(sampling: _Options, request: Mapping[str, Any], limits: GenerationLimits) -> OutputConstraint | None:
    guided = sampling.wanted("guided_decoding", None)
    if not guided:
        return None
    where = "sampling_options.guided_decoding"
    if not isinstance(guided, Mapping):
        raise InvalidArgument(f"{where} must be an object, got {type(guided).__name__}")
    given = [kind for kind in KINDS if guided.get(kind) is not None and guided.get(kind) not in ([], "")]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgument(f"{where} holds {' and '.join(given)}; one constraint is possible")
    if "guided_decoding" in limits.unsupported:
        raise InvalidArgument(f"{where}.{given[0]} is set: constraints on the output are not built for {limits.engine}")
    if (excess := find_excess(guided, DEFAULT_GUIDED_LIMITS)) is not None:
        raise InvalidArgument(f"{where}.{excess.member} {excess.detail}")
    kind = given[0]
    extra = request.get("extra_args")
    has_ended = isinstance(extra, Mapping) and extra.get("reasoning_ended")
    is_after = request.get("require_reasoning") is True and not has_ended
    if is_after and "reasoning" in limits.unsupported:
        raise InvalidArgument(f"{where}.{kind} behind thoughts is not built for {limits.engine}; switch thinking off")
    whitespace = guided.get("whitespace_pattern") or None
    return OutputConstraint(kind, _constraint_value(f"{where}.{kind}", kind, guided[kind]), whitespace, is_after)


def _constraint_value(where: str, kind: ConstraintKind, value: Any) -> Any:
    if kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise InvalidArgument(f"{where} must be a string, got {type(value).__name__}")
        return value
    if kind == "choice":
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
            raise InvalidArgument(f"{where} must be a list of strings")
        return tuple(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{where} is not JSON: {error}") from error
    if not isinstance(value, Mapping | bool) or (kind == "structural_tag" and isinstance(value, bool)):
        raise InvalidArgument(f"{where} must be an object, got {type(value).__name__}")
    return value

"""From the contract's dict to typed values: every field this engine obeys is checked here, once."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.reference.blocks import PrefixKey
from dynamo.reference.sampler import Sampling, Stop

__all__ = ["Job", "Limits", "read_request"]

MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20  # OpenAI's bound
I64: Final = 2**63

# Fields that would change the answer, so that ignoring them would be a lie.
UNSUPPORTED: Final = {
    "prompt_embeds": "embeddings in place of tokens",
    "multi_modal_data": "images, audio and video",
    "encoder_result": "images, audio and video",
    "prefill_result": "disaggregated prefill",
    "bootstrap_info": "disaggregated prefill",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is held against."""

    vocab_size: int
    context_length: int  # prompt and completion together
    eos_token_ids: tuple[int, ...]  # the model's, for a request that names none


@dataclass(frozen=True, slots=True)
class Job:
    """One request, understood."""

    prompt: tuple[int, ...]
    choices: int
    sampling: Sampling
    stop: Stop
    priority: int
    key: PrefixKey
    prompt_logprobs: int | None  # alternatives per prompt token; None: off


def read_request(request: Mapping[str, Any], limits: Limits) -> Job:
    """Raises InvalidArgument naming the field for what cannot be served."""
    for name, what in UNSUPPORTED.items():
        if request.get(name):
            raise InvalidArgument(f"{name} is set, but the reference engine does not support {what}")
    prompt = _prompt(request.get("token_ids"), limits)
    sampling = _Group("sampling_options", request.get("sampling_options"))
    stops = _Group("stop_conditions", request.get("stop_conditions"))
    output = _Group("output_options", request.get("output_options"))
    routing = _Group("routing", request.get("routing"))
    if sampling.get("guided_decoding"):
        raise InvalidArgument("sampling_options.guided_decoding is not supported by the reference engine yet")
    if sampling.get("use_beam_search"):
        raise InvalidArgument("sampling_options.use_beam_search is not supported by the reference engine")
    if routing.get("lora_name"):
        raise InvalidArgument("routing.lora_name is set, but the reference engine does not support LoRA adapters yet")
    if stops.get("max_thinking_tokens"):
        raise InvalidArgument("stop_conditions.max_thinking_tokens is not supported by the reference engine yet")
    choices = sampling.integer("n", 1, 1, MAX_CHOICES)
    if sampling.integer("best_of", choices, 1, MAX_CHOICES) != choices:
        raise InvalidArgument("sampling_options.best_of must equal n: the reference engine returns all it generates")
    logprobs, prompt_logprobs = (
        None if output.get(name) is None else output.integer(name, 0, 0, MAX_LOGPROBS)
        for name in ("logprobs", "prompt_logprobs")
    )
    return Job(
        prompt=prompt,
        choices=choices,
        sampling=_sampling(sampling, logprobs),
        stop=_stop(stops, request.get("eos_token_ids"), limits, limits.context_length - len(prompt)),
        priority=routing.integer("priority", 0, -(2**31), 2**31 - 1),
        key=PrefixKey(cache_salt=routing.text("cache_salt")),
        prompt_logprobs=prompt_logprobs,
    )


def _prompt(token_ids: Any, limits: Limits) -> tuple[int, ...]:
    prompt = tuple(token_ids or ())
    if not prompt:
        raise InvalidArgument("token_ids must not be empty")
    if len(prompt) >= limits.context_length:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens; this model takes at most {limits.context_length - 1} "
            f"(a context of {limits.context_length}, one of them for the answer)"
        )
    for token in prompt:
        if not 0 <= token < limits.vocab_size:
            raise InvalidArgument(f"token_ids holds {token}; this model knows 0 to {limits.vocab_size - 1}")
    return prompt


def _sampling(options: _Group, logprobs: int | None) -> Sampling:
    top_k = options.integer("top_k", 0, -1, 2**31 - 1)
    seed = options.get("seed")
    return Sampling(
        seed=secrets.randbits(63) if seed is None else options.integer("seed", 0, -I64, I64 - 1),
        temperature=options.number("temperature", 1.0, 0.0, 100.0),
        top_p=options.number("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(top_k, 0),
        min_p=options.number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=options.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=options.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=options.number("repetition_penalty", 1.0, 0.0, 100.0, above=True),
        logprobs=logprobs,
    )


def _stop(options: _Group, eos_token_ids: Any, limits: Limits, room: int) -> Stop:
    eos = options.tokens("stop_token_ids_hidden") | frozenset(eos_token_ids or ())
    return Stop(
        # None and 0 both mean "nobody says": then as long as the context goes.
        max_tokens=min(options.integer("max_tokens", 0, 0, 2**31 - 1) or room, room),
        min_tokens=options.integer("min_tokens", 0, 0, 2**31 - 1),
        eos=frozenset() if options.get("ignore_eos") else eos or frozenset(limits.eos_token_ids),
        hidden=options.tokens("stop_token_ids"),
        visible=options.tokens("stop_token_ids_visible"),
    )


class _Group:
    """One of the option groups; it and its members may be None."""

    def __init__(self, name: str, values: Any) -> None:
        if not (values is None or isinstance(values, Mapping)):
            raise InvalidArgument(f"{name} must be an object, got {type(values).__name__}")
        self._name, self._values = name, values or {}

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidArgument(f"{self._name}.{name} must be an integer in {low}..{high}, got {value!r}")
        return value

    def number(self, name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        """`above`: `low` itself is not allowed."""
        value = self.get(name)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            raise InvalidArgument(
                f"{self._name}.{name} must be {'above' if above else 'at least'} {low} and at most {high}, got {value!r}"
            )
        return float(value)

    def tokens(self, name: str) -> frozenset[int]:
        value = self.get(name) or ()
        if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
            raise InvalidArgument(f"{self._name}.{name} must be a list of token ids, got {value!r}")
        return frozenset(value)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if not (value is None or isinstance(value, str)):
            raise InvalidArgument(f"{self._name}.{name} must be a string, got {value!r}")
        return value or None

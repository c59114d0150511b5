"""From the contract's dict to typed values: every field this engine obeys is checked here, once."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dynamo.contract.requests.pooling import NO_POOLING, Pooling
from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.protocol.guided_limits import DEFAULT_GUIDED_LIMITS, GuidedLimits
from dynamo.reference.blocks import PrefixKey
from dynamo.reference.config import NO_DEFAULTS, SamplingDefaults
from dynamo.reference.guided import GuideSpec, read_guide
from dynamo.reference.lora import Adapter
from dynamo.reference.media import NO_MEDIA, MediaPrompt
from dynamo.reference.picture_codes import Vision, known_tokens
from dynamo.reference.sampler import Sampling, Stop
from dynamo.reference.steering import Steering
from dynamo.reference.token_routes import ENVELOPES, check_envelope, with_sglang_sampling

MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20  # OpenAI's bound
MAX_LISTED: Final = 1024  # tokens or words in one of the lists below
MAX_BIAS: Final = 100.0
I64: Final = 2**63
NO_ADAPTERS: Final[Mapping[str, Adapter]] = {}

# Fields that would change the answer, so that ignoring them would be a lie.
UNSUPPORTED: Final = {
    "prompt_embeds": "embeddings in place of tokens",
    "bootstrap_info": "workers that meet by themselves",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is held against."""

    vocab_size: int
    context_length: int  # prompt and completion together
    eos_token_ids: tuple[int, ...]  # the model's, for a request that names none
    defaults: SamplingDefaults = NO_DEFAULTS  # the model's, for options that a request leaves open
    guided: GuidedLimits = DEFAULT_GUIDED_LIMITS
    pooling: Pooling = NO_POOLING  # how vectors are made
    vision: Vision | None = None  # None: the model sees nothing
    generates: bool = True  # False: the model has no head, and makes vectors only


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
    routed: tuple[int, ...] = ()  # the prompt as routers hash it; (): as it is
    produced: int = 0  # of the prompt's last tokens, those that another worker generated for this request
    guided: GuideSpec | None = None
    thinking_tokens: int | None = None  # at most; None: no limit
    awaits_thoughts: bool = False  # `guided` holds for what follows the thoughts
    steering: Steering | None = None  # of the last three, set by the code that prepares the job
    adapter: Adapter | None = None
    pictured: int | None = None  # where the first code of a picture is in the prompt; None: nowhere

    @property
    def needs_steering(self) -> bool:
        return self.guided is not None or self.thinking_tokens is not None


def read_request(
    request: Mapping[str, object],
    limits: Limits,
    *,
    prompt_tokens: int | None = None,
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
    media: MediaPrompt = NO_MEDIA,
) -> Job:
    """Parse a request. `prompt_tokens`: the length of the client's prompt, if migrated. `adapters`: the loaded ones.
    `media`: what stands for its images, sounds and videos.

    Raises InvalidArgument naming the field for what cannot be served.
    """
    if not limits.generates:
        raise InvalidArgument("this model has no head for tokens: it makes vectors, and generates nothing")
    for name, what in UNSUPPORTED.items():
        if request.get(name):
            raise InvalidArgument(f"{name} is set, but the reference engine does not support {what}")
    prompt, routed, produced, pictured = _prompt(request.get("token_ids"), limits, media, prompt_tokens)
    extra = request.get("extra_args")
    extra = extra if isinstance(extra, Mapping) else {}
    check_envelope(extra)
    sampling, stops = (
        _Group(group, with_sglang_sampling(group, request.get(group), extra))
        for group in ("sampling_options", "stop_conditions")
    )
    output = _Group("output_options", request.get("output_options"))
    routing = _Group("routing", request.get("routing"))
    if sampling.get("use_beam_search"):
        raise InvalidArgument("sampling_options.use_beam_search is not supported by the reference engine")
    adapter = adapter_of(routing.text("lora_name"), request.get("model"), adapters)
    choices = sampling.integer("n", 1, 1, MAX_CHOICES)
    if sampling.integer("best_of", choices, 1, MAX_CHOICES) != choices:
        raise InvalidArgument("sampling_options.best_of must equal n: the reference engine returns all it generates")
    logprobs, prompt_logprobs = (
        None if output.get(name) is None else output.integer(name, 0, 0, MAX_LOGPROBS)
        for name in ("logprobs", "prompt_logprobs")
    )
    if prompt_logprobs is not None and pictured is not None:
        raise InvalidArgument(
            "output_options.prompt_logprobs: the tokens of a picture are not predicted, and have none"
        )
    more = _Group("extra_args.sampling_options", extra.get("sampling_options"))
    if more.get("suffix"):
        raise InvalidArgument("suffix is not supported by the reference engine: its models only continue a text")
    thinking = stops.get("max_thinking_tokens")
    return Job(
        prompt=prompt,
        choices=choices,
        sampling=_sampling(sampling, more, logprobs, limits),
        stop=replace(
            _stop(stops, request.get("eos_token_ids"), limits, limits.context_length - len(prompt)),
            # Where a text is scored (`echo` with `logprobs`) a client counts on a token after the prompt, and leaves it out.
            shows_ends=not ENVELOPES.isdisjoint(extra) or (logprobs is not None and prompt_logprobs is not None),
        ),
        priority=routing.integer("priority", 0, -(2**31), 2**31 - 1),
        key=PrefixKey(cache_salt=routing.text("cache_salt"), lora_name=None if adapter is None else adapter.name),
        prompt_logprobs=prompt_logprobs,
        produced=produced,
        routed=routed,
        guided=read_guide(sampling.get("guided_decoding"), limits.guided),
        thinking_tokens=None if thinking is None else stops.integer("max_thinking_tokens", 0, 0, 2**31 - 1),
        adapter=adapter,
        pictured=pictured,
        awaits_thoughts=request.get("require_reasoning") is True and not extra.get("reasoning_ended"),
    )


def adapter_of(lora_name: str | None, model: Any, adapters: Mapping[str, Adapter]) -> Adapter | None:
    """Return the adapter of a request: the router's choice, or a model name that is an adapter's."""
    if lora_name is None:
        return adapters.get(model) if isinstance(model, str) else None
    if lora_name not in adapters:
        # Not the caller's fault: it may be unloaded here at this moment, and another worker may have it.
        raise WorkerUnavailable(f"routing.lora_name is {lora_name!r}, but no such adapter is loaded on this worker")
    return adapters[lora_name]


def _prompt(
    token_ids: Any, limits: Limits, media: MediaPrompt, prompt_tokens: int | None
) -> tuple[tuple[int, ...], tuple[int, ...], int, int | None]:
    """Return the prompt with its media, as routers hash it (`MediaPrompt.placed`), how many tokens were generated, and where
    the first code of a picture is."""
    if not token_ids:
        raise InvalidArgument("token_ids must not be empty")
    produced = 0 if prompt_tokens is None else max(len(token_ids) - prompt_tokens, 0)
    prompt, routed = media.placed(token_ids, len(token_ids) - produced, limits.vision)
    if len(prompt) >= limits.context_length:
        raise InvalidArgument(
            f"the prompt has {len(prompt)} tokens; this model takes at most {limits.context_length - 1} "
            f"(a context of {limits.context_length}, one of them for the answer)"
        )
    for token in prompt:
        if not 0 <= token < limits.vocab_size:
            break
    else:  # nearly always: there is no picture
        return prompt, routed, produced, None
    known = known_tokens(limits.vocab_size, limits.vision)
    for token in prompt:
        if not 0 <= token < known:
            raise InvalidArgument(f"token_ids holds {token}; this model knows 0 to {known - 1}")
    pictured = next(place for place, token in enumerate(prompt) if token >= limits.vocab_size)
    return prompt, routed, produced, pictured


def _sampling(options: _Group, more: _Group, logprobs: int | None, limits: Limits) -> Sampling:
    default = limits.defaults
    seed = options.get("seed")
    top_k = options.integer("top_k", default.top_k, -1, 2**31 - 1)
    allowed = more.tokens("allowed_token_ids", limits.vocab_size)
    reported = more.tokens("logprob_token_ids", limits.vocab_size)
    return Sampling(
        seed=secrets.randbits(63) if seed is None else options.integer("seed", 0, -I64, I64 - 1),
        temperature=options.number("temperature", default.temperature, 0.0, 100.0),
        top_p=options.number("top_p", default.top_p, 0.0, 1.0, above=True),
        top_k=max(top_k, 0),
        min_p=options.number("min_p", default.min_p, 0.0, 1.0),
        presence_penalty=options.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=options.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=options.number("repetition_penalty", default.repetition_penalty, 0.0, 100.0, above=True),
        bias=_bias(more, limits.vocab_size),
        allowed_tokens=None if more.get("allowed_token_ids") is None else frozenset(allowed),
        bad_words=more.words("bad_words_token_ids", limits.vocab_size),
        logprobs=0 if reported and logprobs is None else logprobs,
        logprob_tokens=reported,
    )


def _bias(options: _Group, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Parse `logit_bias`: an object from token ids, which JSON writes as strings, to numbers."""
    value = options.get("logit_bias") or {}
    try:
        found = tuple((int(token), float(bias)) for token, bias in value.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"logit_bias must map token ids to numbers, got {value!r}") from error
    for token, bias in found:
        if not 0 <= token < vocab_size:
            raise InvalidArgument(f"logit_bias holds the token {token}; this model knows 0 to {vocab_size - 1}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgument(f"logit_bias for token {token} must be between -100 and 100, got {bias}")
    return found


def _stop(options: _Group, eos_token_ids: Any, limits: Limits, room: int) -> Stop:
    vocab = limits.vocab_size
    eos = frozenset(options.tokens("stop_token_ids_hidden", vocab, others=True)) | _eos(eos_token_ids, vocab)
    return Stop(
        # None and 0 both mean "not given": then as long as the context goes.
        max_tokens=min(options.integer("max_tokens", 0, 0, 2**31 - 1) or room, room),
        min_tokens=options.integer("min_tokens", 0, 0, 2**31 - 1),
        eos=frozenset() if options.get("ignore_eos") else eos or frozenset(limits.eos_token_ids),
        hidden=frozenset(options.tokens("stop_token_ids", vocab, others=True)),
        visible=frozenset(options.tokens("stop_token_ids_visible", vocab, others=True)),
    )


def _eos(token_ids: Any, vocab_size: int) -> frozenset[int]:
    """Drop the end tokens that the model has no logits for: the model cannot generate these tokens."""
    return frozenset(token for token in token_ids or () if 0 <= token < vocab_size)


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
        """Parse a number in a range. `above`: `low` itself is not allowed."""
        value = self.get(name)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above and value == low):
            raise InvalidArgument(
                f"{self._name}.{name} must be {'above' if above else 'at least'} {low} and at most {high}, got {value!r}"
            )
        return float(value)

    def tokens(self, name: str, vocab_size: int, *, others: bool = False) -> tuple[int, ...]:
        """Parse a list of token ids. With `others`, ids outside the vocabulary are dropped and not rejected."""
        value = self.get(name)
        return () if value is None else self._checked(name, value, vocab_size, others=others)

    def words(self, name: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Parse a list of lists of token ids."""
        value = self.get(name)
        value = [] if value is None else value
        if not isinstance(value, list | tuple) or not all(value) or len(value) > MAX_LISTED:
            raise InvalidArgument(f"{self._name}.{name} must be a list of at most {MAX_LISTED} lists of token ids")
        return tuple(self._checked(name, word, vocab_size, others=False) for word in value)

    def _checked(self, name: str, value: object, vocab_size: int, *, others: bool) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
            raise InvalidArgument(f"{self._name}.{name} must be a list of token ids, got {value!r}")
        if len(value) > max(MAX_LISTED, vocab_size):
            raise InvalidArgument(f"{self._name}.{name} has {len(value)} entries, more than the model has tokens")
        known = tuple(token for token in value if 0 <= token < vocab_size)
        if not others and len(known) < len(value):
            raise InvalidArgument(f"{self._name}.{name} holds a token id that is not in 0..{vocab_size - 1}")
        return known

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if not (value is None or isinstance(value, str)):
            raise InvalidArgument(f"{self._name}.{name} must be a string, got {value!r}")
        return value or None

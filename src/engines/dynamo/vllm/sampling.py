"""From the contract's request to the arguments of vLLM's `SamplingParams`. No vLLM here: plain values in and out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dynamo.contract.requests.logprobs import parse_logprob_options
from dynamo.contract.requests.structural_tag import serialize_structural_tag
from dynamo.errors import InvalidArgument

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
    return {name: value for name, value in found.items() if value is not None}


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

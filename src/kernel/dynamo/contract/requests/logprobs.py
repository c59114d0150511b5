"""From the logprob shapes of vLLM, TensorRT-LLM and SGLang to `log_probs` and `top_logprobs` of a chunk."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.contract.chunks import TopLogprob

__all__ = [
    "build_sglang_logprob_kwargs",
    "extract_from_completion_output",
    "extract_from_sglang_meta",
    "extract_prompt_logprobs_from_completion_output",
    "extract_prompt_logprobs_from_sglang_meta",
    "parse_logprob_options",
]

logger = logging.getLogger(__name__)

Logprobs = tuple[list[float] | None, list[list[TopLogprob]] | None]
"""(one logprob per new token, the alternatives per new token); None: nothing to report."""

PromptLogprobs = list[dict[str, dict[str, Any]] | None]
"""One mapping per prompt token, keyed by token id as text; None where nothing was computed (the first token)."""


# -- what is requested ------------------------------------------------------------------------------------------------


def parse_logprob_options(output_options: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Read (logprobs, prompt_logprobs) of a request; None: off. An impossible value is off, with a warning."""
    return _count(output_options, "logprobs"), _count(output_options, "prompt_logprobs")


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None or value == "":
        return None
    try:
        if isinstance(value, bool | float):
            raise ValueError(value)
        number = int(value)
    except (TypeError, ValueError):
        logger.warning("output_options.%s must be an integer, got %r; no logprobs are reported", name, value)
        return None
    if number < 0:
        logger.warning("output_options.%s must not be negative, got %d; no logprobs are reported", name, number)
        return None
    return number


def build_sglang_logprob_kwargs(output_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of SGLang's `async_generate` for these options; {} when no logprobs are requested."""
    logprobs, prompt_logprobs = parse_logprob_options(output_options)
    if logprobs is None and prompt_logprobs is None:
        return {}
    arguments: dict[str, Any] = {
        "return_logprob": True,
        "top_logprobs_num": max(logprobs or 0, prompt_logprobs or 0),
    }
    if prompt_logprobs is not None:
        arguments["logprob_start_len"] = 0  # from the first prompt token; absent: generated tokens only
    return arguments


# -- vLLM and TensorRT-LLM: an object with `token_ids` and `logprobs` --------------------------------------------------


def extract_from_completion_output(
    output: Any,
    num_output_tokens_so_far: int,
    tokenizer: Any = None,
    *,
    fallback_to_first_on_missing: bool = False,
    include_bytes: bool = False,
) -> Logprobs:
    """Return the logprobs of the tokens after the first `num_output_tokens_so_far`.

    All or nothing: when one position has no logprob, or the chosen token is missing in it (and may not be replaced by
    the first alternative), nothing is reported for the chunk, because `log_probs` must align with its tokens.
    """
    positions = output.logprobs
    if not positions:
        return None, None
    start = num_output_tokens_so_far
    token_ids = list(output.token_ids[start:])
    positions = list(positions[start : start + len(token_ids)])
    if not token_ids or len(positions) != len(token_ids):
        return None, None
    if all(_is_number(position) for position in positions):
        return [float(position) for position in positions], None

    chosen: list[float] = []
    alternatives: list[list[TopLogprob]] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        if not isinstance(position, Mapping) or not position:
            return None, None
        entry = position.get(token_id)
        if entry is None:
            if not fallback_to_first_on_missing:
                return None, None
            entry = next(iter(position.values()))
        chosen.append(_logprob(entry))
        alternatives.append([_alternative(key, value, tokenizer, include_bytes) for key, value in position.items()])
    return chosen, alternatives


def extract_prompt_logprobs_from_completion_output(output: Any, tokenizer: Any = None) -> PromptLogprobs | None:
    """Return the prompt's logprobs for `engine_data["prompt_logprobs"]` of the last chunk; None when there are none.

    `tokenizer` decodes the tokens that come without their text.
    """
    positions = getattr(output, "prompt_logprobs", None)
    if not positions:
        return None
    return [
        {str(token_id): _prompt_entry(token_id, entry, tokenizer) for token_id, entry in position.items()}
        if isinstance(position, Mapping)
        else None
        for position in positions
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _logprob(entry: Any) -> float:
    return float(entry) if _is_number(entry) else float(entry.logprob)


def _alternative(token_id: Any, entry: Any, tokenizer: Any, include_bytes: bool) -> TopLogprob:
    text = getattr(entry, "decoded_token", None)
    if text is None:
        text = _decode(tokenizer, int(token_id))
    found: TopLogprob = {
        "rank": int(getattr(entry, "rank", None) or 0),
        "token_id": int(token_id),
        "token": text,
        "logprob": _logprob(entry),
    }
    if include_bytes and text is not None:
        found["bytes"] = list(text.encode("utf-8", "replace"))
    return found


def _decode(tokenizer: Any, token_id: int) -> str | None:
    if tokenizer is None:
        return None
    try:
        return str(tokenizer.decode([token_id]))
    except Exception as error:  # any tokenizer may be behind this; a missing text must not cost the answer
        logger.debug("token %d could not be decoded for its logprob: %s", token_id, error)
        return None


def _prompt_entry(token_id: Any, entry: Any, tokenizer: Any) -> dict[str, Any]:
    text = getattr(entry, "decoded_token", None)
    if text is None:
        text = _decode(tokenizer, int(token_id))
    rank = getattr(entry, "rank", None)
    record: dict[str, Any] = {"logprob": _logprob(entry)}
    return record | ({} if rank is None else {"rank": rank}) | _decoded(text)


# -- SGLang: `meta_info` with lists of (logprob, token id, text) -------------------------------------------------------


def extract_from_sglang_meta(meta_info: Mapping[str, Any], *, return_tokens_as_token_ids: bool = False) -> Logprobs:
    """Return the logprobs in one `meta_info` of SGLang, whose lists hold this chunk's tokens only."""
    selected = meta_info.get("output_token_logprobs")
    if not selected:
        return None, None
    tops = meta_info.get("output_top_logprobs")
    alternatives = (
        None if not tops else [_sglang_alternatives(position, return_tokens_as_token_ids) for position in tops]
    )
    return [float(position[0]) for position in selected], alternatives


def _sglang_alternatives(position: Sequence[Any] | None, as_token_ids: bool) -> list[TopLogprob]:
    return [
        {
            "rank": rank,
            "token_id": int(token_id),
            "token": f"token_id:{token_id}" if as_token_ids else text,
            "logprob": float(logprob),
        }
        for rank, (logprob, token_id, text) in enumerate(position or (), start=1)
    ]


def extract_prompt_logprobs_from_sglang_meta(meta: Mapping[str, Any]) -> PromptLogprobs | None:
    """Return the prompt's logprobs for `engine_data["prompt_logprobs"]`; None when there are none."""
    selected = meta.get("input_token_logprobs")
    if not selected:
        return None
    tops = meta.get("input_top_logprobs") or [None] * len(selected)
    return [_sglang_prompt_position(*pair) for pair in zip(selected, tops, strict=False)]


def _sglang_prompt_position(selected: Sequence[Any] | None, top: Sequence[Any] | None) -> dict[str, Any] | None:
    if selected is None or selected[0] is None:
        return None
    entries: dict[str, Any] = {}
    for logprob, token_id, text in top or ():
        entries[str(token_id)] = {"logprob": float(logprob)} | _decoded(text)
    logprob, token_id, text = selected
    entries.setdefault(str(token_id), {"logprob": float(logprob)} | _decoded(text))
    return entries


def _decoded(text: str | None) -> dict[str, str]:
    return {} if text is None else {"decoded_token": text}

"""A request's body without what its author wrote: parameters stay, texts become their lengths. Pure.

What is kept is listed; any other member is described and not kept, so an unexpected member is no leak.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from dynamo.protocol.openai.shapes import JsonObject

PARAMETERS: Final = frozenset(
    """
    best_of continue_final_message dimensions echo encoding_format frequency_penalty
    guidance_scale ignore_eos include include_reasoning include_stop_str_in_output length_penalty logit_bias logprobs
    max_completion_tokens max_output_tokens max_tokens max_thinking_tokens max_tool_calls min_p min_tokens modalities model n
    num_inference_steps output_format parallel_tool_calls presence_penalty priority prompt_logprobs quality reasoning
    reasoning_effort repetition_penalty response_length return_tokens_as_token_ids seed service_tier size
    skip_special_tokens stop stop_sequences stop_token_ids store stream stream_options temperature thinking tool_choice top_k
    top_logprobs top_n top_p truncate truncate_prompt_tokens truncation use_beam_search verbosity
    add_generation_prompt add_special_tokens
    """.split()  # noqa: SIM905 - sixty quoted words would hide the words
)
"""Members at the top of a body that are kept as they are, where they are short."""

_NVEXT: Final = frozenset(
    """
    annotations backend_instance_id decode_worker_id dp_rank extra_fields greed_sampling ignore_eos max_thinking_tokens
    prefill_worker_id priority repetition_penalty routing_constraints top_k use_raw_prompt
    """.split()  # noqa: SIM905 - as above
)
_CONVERSATIONS: Final = frozenset({"messages", "input"})
_MESSAGE_WORDS: Final = frozenset({"role", "type", "status", "detail"})
MAX_KEPT_BYTES: Final = 2048  # of one parameter
MAX_MESSAGES: Final = 256  # that are described one by one
MAX_PARTS: Final = 64  # of one message
_MARK_KEY: Final = os.urandom(16)  # marks of short texts could be guessed if others could compute them


def decode_body(body: bytes) -> object:
    """Return the JSON of a body; None where it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def shape_of(body: Any) -> JsonObject | None:
    """Return a decoded body with its parameters, and a description in place of everything else; None for no object."""
    if not isinstance(body, dict):
        return None
    shape: JsonObject = {}
    for name, value in body.items():
        if name in PARAMETERS and len(msgspec.json.encode(value)) <= MAX_KEPT_BYTES:
            shape[name] = value
        elif name in _CONVERSATIONS and isinstance(value, list):
            shape[name] = [_message(each) for each in value[:MAX_MESSAGES]]
            if len(value) > MAX_MESSAGES:
                shape[name].append({"omitted": "messages", "count": len(value) - MAX_MESSAGES})
        elif name == "nvext" and isinstance(value, dict):
            shape[name] = {key: kept if key in _NVEXT else describe(kept) for key, kept in value.items()}
        else:
            shape[name[:128]] = describe(value)
    return shape


def describe(value: object) -> object:
    """Return what may be shown of a value that is content: its kind, its size, and a mark that equal values share.

    Marks are comparable within one process and mean nothing outside it. null, true and false stay.
    """
    if value is None or isinstance(value, bool):
        return value
    encoded = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    found: dict[str, object]
    if isinstance(value, str):
        found = {"omitted": "text", "characters": len(value)}
    elif isinstance(value, list):
        is_ids = bool(value) and all(isinstance(each, int) for each in value)
        found = {"omitted": "ids" if is_ids else "list", "count": len(value)}
    elif isinstance(value, Mapping):
        found = {"omitted": "object", "members": len(value)}
    else:
        found = {"omitted": "number"}
    found["bytes"] = len(encoded)
    found["mark"] = hashlib.blake2b(encoded, digest_size=6, key=_MARK_KEY).hexdigest()
    return found


def content_texts(body: object) -> Iterator[str]:
    """Yield every text of a body that is content."""
    if isinstance(body, dict):
        for name, value in body.items():
            if name not in PARAMETERS:
                yield from _texts(value)


def _message(message: object) -> object:
    """Describe one message: its role, and each part of its content apart."""
    if not isinstance(message, dict):
        return describe(message)
    shape: dict[str, object] = {}
    for name, value in message.items():
        if name in _MESSAGE_WORDS and isinstance(value, str) and len(value) <= 32:
            shape[name] = value
        elif name == "content" and isinstance(value, list):
            shape[name] = [_part(part) for part in value[:MAX_PARTS]]
        else:
            shape[name[:64]] = describe(value)
    return shape


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or len(kind) > 32:
        return describe(part)
    return {"type": kind, **{name[:64]: describe(value) for name, value in part.items() if name != "type"}}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)

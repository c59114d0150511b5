"""Members that clients of other servers send and that mean nothing here: accepted, and logged once by name.

Each row gives its reason. A member is here only if no answer would be different for it. One that changes answers at some of
its values is here with the values at which it changes nothing (clients write out their defaults); at every other value it is
refused like any member that does not exist, because an answer without it would not be the one that was requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec


class ForeignMember(NamedTuple):
    """Why a member has no effect, and at which values; None: at any."""

    reason: str
    neutral: tuple[Any, ...] | None = None


_LITELLM: Final = (
    "LiteLLM's client reads it itself: where and how often a request is sent, and what it is called in logs"
)
_OPENROUTER: Final = "OpenRouter: which provider serves the request; here the workers of the model do"
_SLOTS: Final = "llama.cpp: a slot of its server; here any worker may have any cache"
_SAMPLER_OFF: Final = "a sampler that no engine here has; at this value it is switched off"
_BEAMS: Final = "only of beam search, which is not served"

FOREIGN_MEMBERS: Final[Mapping[str, ForeignMember]] = {
    # LiteLLM and clients of its proxy
    **dict.fromkeys(
        (
            "api_base",
            "api_key",
            "api_type",
            "api_version",
            "base_url",
            "cache",
            "caching",
            "custom_llm_provider",
            "drop_params",
            "fallbacks",
            "litellm_call_id",
            "litellm_metadata",
            "litellm_session_id",
            "litellm_trace_id",
            "max_retries",
            "no-log",
            "num_retries",
            "organization",
            "request_timeout",
            "tags",
            "timeout",
        ),
        ForeignMember(_LITELLM),
    ),
    # OpenRouter
    **dict.fromkeys(("models", "provider", "route"), ForeignMember(_OPENROUTER)),
    "transforms": ForeignMember("OpenRouter: shortens a prompt that is too long; an empty list shortens none", ([],)),
    "usage": ForeignMember("OpenRouter: asks for usage, which answers have (streams by stream_options)"),
    "include_reasoning": ForeignMember("OpenRouter and vLLM: reasoning is shown unless it is switched off", (True,)),
    # Ollama and LM Studio
    "keep_alive": ForeignMember("Ollama: how long the model stays loaded; a worker's model stays"),
    "ttl": ForeignMember("LM Studio: how long the model stays loaded; a worker's model stays"),
    "draft_model": ForeignMember("LM Studio: speeds an answer up and changes no token of it"),
    # llama.cpp
    **dict.fromkeys(("id_slot", "slot_id"), ForeignMember(_SLOTS)),
    "cache_prompt": ForeignMember("llama.cpp: reuse of a prompt's beginning, which engines here do by themselves"),
    "n_cache_reuse": ForeignMember("llama.cpp: how pieces of the cache are reused; no token depends on it"),
    "return_progress": ForeignMember("llama.cpp: progress of long prompts in the stream, which its clients can lack"),
    "timings_per_token": ForeignMember("llama.cpp: times in the stream, which its clients can lack; see nvext timing"),
    # SGLang
    "separate_reasoning": ForeignMember("SGLang: reasoning in a member of its own, as here", (True,)),
    "stream_reasoning": ForeignMember("SGLang: reasoning is streamed as it comes, as here", (True,)),
    "no_stop_trim": ForeignMember("SGLang: stop strings stay in the text; see include_stop_str_in_output", (False,)),
    "return_hidden_states": ForeignMember("SGLang: no hidden states, as here", (False,)),
    # vLLM and TGI
    "spaces_between_special_tokens": ForeignMember(
        "vLLM: only tokenizers without a tokenizer.json read it; those here put in no space by themselves"
    ),
    "use_beam_search": ForeignMember("vLLM: beam search is not served", (False,)),
    "early_stopping": ForeignMember(_BEAMS),
    "length_penalty": ForeignMember(_BEAMS),
    "num_beams": ForeignMember(_BEAMS, (1,)),
    "do_sample": ForeignMember("transformers and TGI: sampling, which temperature decides here", (True,)),
    "watermark": ForeignMember("TGI: no watermark, as here", (False,)),
    "details": ForeignMember("TGI: its own form of details, which its clients read from its own routes only"),
    # samplers, at the values that their clients write out as defaults
    **dict.fromkeys(
        (
            "dry_multiplier",
            "dynatemp_range",
            "mirostat",
            "mirostat_mode",
            "smoothing_factor",
            "top_a",
            "top_n_sigma",
            "typical",
            "xtc_probability",
        ),
        ForeignMember(_SAMPLER_OFF, (0,)),
    ),
    **dict.fromkeys(("tfs", "tfs_z", "typical_p", "repeat_penalty"), ForeignMember(_SAMPLER_OFF, (1,))),
    **dict.fromkeys(
        (
            "dry_allowed_length",
            "dry_base",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "dynatemp_exponent",
            "mirostat_eta",
            "mirostat_tau",
            "repeat_last_n",
            "xtc_threshold",
        ),
        ForeignMember("shapes a sampler that is switched off, as a request that switches it on is refused"),
    ),
    # tracing and sessions of clients
    **dict.fromkeys(
        ("conversation_id", "session_id", "thread_id", "trace", "trace_id"),
        ForeignMember("names of the client's own, for its own logs"),
    ),
    "stream_interval": ForeignMember("how many tokens share a chunk; the text is the same"),
}


def is_meaningless(name: str, value: bytes) -> bool:
    """Return whether a member that does not exist has no effect at this value, which is JSON."""
    row = FOREIGN_MEMBERS.get(name)
    if row is None:
        return False
    if row.neutral is None:
        return True
    try:
        given = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return any(given == neutral and isinstance(given, bool) is isinstance(neutral, bool) for neutral in row.neutral)

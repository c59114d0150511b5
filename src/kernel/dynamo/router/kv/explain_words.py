"""What the words of an explained decision mean: they are codes of policies and filters, for programs to compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from dynamo.placement.kv_query import Trust

_UNITS: Final = {
    "ms": "estimated milliseconds that serving there costs, to this request and to those beside it",
    "blocks": "KV blocks: those to be computed for the prompts there, and those that running requests use",
    "requests": "requests that run there",
}

_TRUST: Final[Mapping[str, str]] = {
    Trust.EXACT: "every KV event of the worker was applied: what it holds is known",
    Trust.DEGRADED: "KV events of the worker were lost, and the repair is under way: it may hold something else",
    Trust.PREDICTED: "the worker publishes no KV events: what it holds is guessed from the prompts that it was sent",
    Trust.NONE: "nothing is known of the worker's cache: its load alone counts",
}

# Terms of a cost, by name; those of `time` first, then those of `default` and `two-tier`.
_TERMS: Final = {
    "wait": "until the pass that runs there has ended",
    "prefill": "computing the prompt tokens that the worker does not hold, behind those that wait there",
    "stall": "for the streams and prompts there, which wait while this prompt is computed",
    "future": "for requests that arrive while this prompt is computed",
    "decode": "longer steps, as the worker has one more context to read",
    "eviction": "computing again what has to leave the cache",
    "room": "until running requests have ended and left room for the prompt",
    "preference": "for the taints or the place that the request prefers",
    "prompt": "the prompt, as if nothing of it was held",
    "queued_prefill": "prompts that wait there already",
    "device_overlap": "credit for the prompt's blocks in the worker's GPU memory",
    "host_overlap": "credit for the prompt's blocks in the worker's host memory",
    "disk_overlap": "credit for the prompt's blocks on the worker's disk",
    "shared_cache": "credit for the prompt's blocks in a shared cache",
    "active_blocks": "blocks of the requests that run there",
    "new_blocks": "blocks that the prompt adds to those",
    "active_requests": "requests that run there",
    "limits_and_preference": "the limits at 0, and what the request prefers",
}

_REASONS: Final = {
    "session": "because its session is bound to it",
    "lowest_cost": "because serving there costs least",
    "sampled": "by chance, which prefers cheaper workers (the router's temperature is above 0)",
    "out_of_balance": "because it has the fewest requests, and the workers' numbers of requests are far apart",
    "longest_match": "because it holds the longest part of the prompt",
    "match_too_short": "because it has the fewest requests, and no worker holds enough of the prompt",
}

_EXCLUSIONS: Final = {
    "not_pinned": "the request names another worker",
    "other_rank": "the request names another rank",
    "not_allowed": "not one of the workers that may serve this request",
    "excluded": "the request failed there before",
    "taints": "the worker lacks a taint that the request requires",
    "topology": "the worker is in another place than the request requires",
    "overloaded": "the worker is above a busy threshold",
}

_ALL: Final[Mapping[str, str]] = {**_UNITS, **_TRUST, **_TERMS, **_REASONS, **_EXCLUSIONS}


def meanings_of(words: Iterable[str]) -> dict[str, str]:
    """Return what each of the words means, those that have a meaning here."""
    return {word: _ALL[word] for word in dict.fromkeys(words) if word in _ALL}


def reason_of(code: str) -> str:
    """Return the reason of a choice as the end of a sentence."""
    return _REASONS.get(code, code)

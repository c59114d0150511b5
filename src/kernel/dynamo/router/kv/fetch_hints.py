"""Names to a worker another one that holds more of its prompt, where its engine can fetch blocks from there.

What an engine can do stands in the `runtime_data` of its card. An engine that declares nothing gets no hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

from dynamo.kv.hashing import to_unsigned
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import Overlap
from dynamo.placement.kv_query import FetchTerms
from dynamo.placement.kv_state import Selection
from dynamo.protocol.records import FETCH_ENDPOINTS, FETCH_WORKER_TYPE, TAKES_FETCH_HINTS
from dynamo.router.kv.router import KvRouter

WORKER_TYPES: Final = ("aggregated", "prefill", "decode")
_UNSPECIFIED: Final = ("", "0.0.0.0", "::", "*")
_NOTHING: Final = Overlap()


def fetch_terms(runtime_data: Mapping[str, Any], dp_rank: int) -> FetchTerms | None:
    """Return what a card declares of one rank; None where there is nothing that can be used."""
    worker_type, endpoints = runtime_data.get(FETCH_WORKER_TYPE), runtime_data.get(FETCH_ENDPOINTS)
    if worker_type not in WORKER_TYPES:
        return None
    endpoint = endpoints.get(str(dp_rank)) if isinstance(endpoints, Mapping) else None
    return FetchTerms(
        worker_type,
        endpoint if isinstance(endpoint, str) and _is_reachable(endpoint) else None,
        runtime_data.get(TAKES_FETCH_HINTS) is True,
    )


def fetch_hint(router: KvRouter, selection: Selection) -> dict[str, Any]:
    """Return the member `kv_hint` of a request to the chosen rank; empty where there is nothing to fetch.

    The source is the rank of the same type that holds most of the prompt on its device, and more than the chosen one does.
    """
    index, ranks, target = router.index, router.ranks, selection.rank
    own = ranks[target].fetches if target in ranks else None
    if own is None or not own.takes_hints or not isinstance(index, PrefixIndex):
        return {}
    sequence = selection.lookup.sequence
    found = index.find(sequence)
    least = found.get(target, _NOTHING).device
    sources = [
        (-overlap.device, rank, terms.control_endpoint)
        for rank, overlap in found.items()
        if overlap.device > least
        and rank in ranks
        and (terms := ranks[rank].fetches) is not None
        and terms.control_endpoint is not None
        and terms.worker_type == own.worker_type
    ]
    if not sources:
        return {}
    depth, source, endpoint = min(sources)
    blocks = [to_unsigned(name) for name in index.engine_names(source, sequence[:-depth])]
    if len(blocks) <= least:
        return {}
    payload = {"source_control_endpoint": endpoint, "block_hashes": blocks}
    action = {"action_id": str(uuid4()), "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"kv_hint": {"protocol_version": "0.1", "message_id": str(uuid4()), "actions": [action]}}


def _is_reachable(endpoint: str) -> bool:
    """Return whether an address is `tcp://host:port` that another machine can connect to."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme == "tcp" and (parts.hostname or "") not in _UNSPECIFIED and bool(parts.port)
    except ValueError:
        return False

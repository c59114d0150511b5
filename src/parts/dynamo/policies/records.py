"""What a user's policy gets and gives. The members of both records stay as they are: policies of users read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from dynamo.placement.kv_state import NO_MATCH, KvState, RankMatch, RankState

MAX_DEFER_SECONDS = 30.0
"""The longest time that `classify` may hold a request back."""


class PolicyRequest(Struct, frozen=True, gc=False, kw_only=True):
    """One request, as a policy sees it."""

    prompt_tokens: int
    block_size: int  # tokens of a KV block
    expected_output: int | None = None  # tokens that it announces; None: not known
    session_id: str | None = None  # of `x-dynamo-session-id`
    tenant: str | None = None  # owner of the API key; None: no keys are in use
    lora_name: str | None = None
    priority: float = 0.0  # seconds of waiting that it is ahead of others
    now: float = 0.0  # seconds of a clock that never goes back; its beginning means nothing


class PolicyCandidate(Struct, frozen=True, gc=False):
    """One rank of a worker that may serve the request: what it holds of the prompt, and what it has to do."""

    worker_id: int
    dp_rank: int
    cached_tokens: int  # of the prompt, in the memory of the device
    host_tokens: int  # further ones in the memory of the host
    disk_tokens: int  # further ones on a disk or in a shared store
    coming_tokens: int  # that prompts before this one are about to leave in its cache, beyond the cached ones
    requests: int  # that it serves, those without a first token included
    streams: int  # of those, the ones that have had their first token
    pending_tokens: int  # prompt tokens that it has still to compute
    waiting_requests: int  # behind the prefill that runs now
    decode_blocks: float  # KV blocks of all requests that it serves
    context_tokens: int  # prompts and known output of all requests that it serves
    labels: frozenset[str]  # taints of its card, such as "gpu=h100"; places are "DOMAIN=VALUE", too
    state: RankState  # everything else: limits of the engine, how far its cache is known (`trust`), learned speed (`timing`)

    def prefill_ms(self, tokens: float) -> float:
        """Return how long this rank needs for a prefill of so many tokens, by what it has shown of its speed."""
        return self.state.timing.prefill.at(tokens)

    @property
    def step_ms(self) -> float:
        """Milliseconds that one decode step takes there now, by what it has shown of its speed."""
        state = self.state
        fill = state.context_tokens / (state.total_kv_blocks * 16) if state.total_kv_blocks else 0.0
        return state.timing.step_ms(min(1.0, fill), state.streams)


class Classified(Struct, frozen=True, kw_only=True):
    """What `classify` changes of a request. Every member may stay as it is here."""

    defer_seconds: float = 0.0  # hold it back for so long, `MAX_DEFER_SECONDS` at the most
    priority: float | None = None  # seconds of waiting that it gets ahead in the router's queue
    due_ms: float | None = None  # its first token should be there within so many ms, whatever its own target is
    worker_id: int | None = None  # send it there if that worker may serve it


class WorkerPolicy(Protocol):
    """The methods of a policy. A class needs one of them at least, and need not derive from this one.

    A policy may be called for an explanation only, and called again for a request that moves: what it returns should depend on its
    arguments alone. It is called on the event loop, and has `TIME_LIMIT_SECONDS` for all of a decision.
    """

    def filter(self, request: PolicyRequest, candidates: Sequence[PolicyCandidate]) -> Sequence[PolicyCandidate]:
        """Return the candidates that may serve the request; where it returns none, the request is refused."""
        ...

    def score(self, request: PolicyRequest, candidate: PolicyCandidate) -> float:
        """Return the cost of serving the request there: the lowest one is chosen, and chance decides between equals."""
        ...

    def pick(
        self, request: PolicyRequest, candidates: Sequence[PolicyCandidate], scores: Sequence[float]
    ) -> PolicyCandidate:
        """Return one of the candidates, in the place of the lowest score. `scores`: in their order; empty without `score`."""
        ...

    def classify(self, request: PolicyRequest, candidates: Sequence[PolicyCandidate]) -> Classified | None:
        """Return what is changed of a new request before a worker is chosen; None: nothing. No prompt was looked up yet:
        what candidates hold of it is 0."""
        ...


def candidate_of(state: RankState, match: RankMatch, block_size: int, prompt_tokens: int) -> PolicyCandidate:
    """Make the record of one rank. Tokens that it holds are whole blocks, and no more than the prompt has."""
    overlap = match.overlap
    if match is NO_MATCH:
        device = host = disk = coming = 0
    else:
        device = min(prompt_tokens, overlap.device * block_size)
        host = min(prompt_tokens - device, overlap.host * block_size)
        disk = min(prompt_tokens - device - host, overlap.disk * block_size)
        coming = max(0, min(prompt_tokens, match.coming_blocks * block_size) - device)
    rank = state.rank
    return PolicyCandidate(
        rank.worker_id,
        rank.dp_rank,
        device,
        host,
        disk,
        coming,
        state.requests,
        state.streams,
        state.prefill_tokens,
        state.waiting_requests,
        state.decode_blocks,
        state.context_tokens,
        state.taints,
        state,
    )


def request_of(state: KvState) -> PolicyRequest:
    """Make the record of the request of a decision."""
    request, origin = state.request, state.request.origin
    if origin is None:
        return PolicyRequest(
            prompt_tokens=request.prompt_tokens,
            block_size=state.block_size,
            expected_output=request.expected_output,
            now=state.now,
        )
    return PolicyRequest(
        prompt_tokens=request.prompt_tokens,
        block_size=state.block_size,
        expected_output=request.expected_output,
        session_id=origin.session_id,
        tenant=origin.tenant,
        lora_name=origin.lora_name,
        priority=origin.priority,
        now=state.now,
    )

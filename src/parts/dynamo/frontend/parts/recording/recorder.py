"""Records of requests as they end, in the schema `dynamo.request.trace.v1`.

The event loop notes when each part of an answer came, and hands a request over once it has ended. All else, from the hashes of
its prompt to the line in the file, happens in the writer's thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.frontend.base.redaction import Redact
from dynamo.frontend.base.settings.request_trace import (
    REQUEST_END,
    REQUEST_PAYLOAD,
    REQUEST_STREAM,
    RequestTraceSettings,
)
from dynamo.frontend.parts.recording.request_shape import decode_body, shape_of
from dynamo.frontend.parts.recording.trace_writer import TraceWriter
from dynamo.frontend.pipeline.tap import RequestTap
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.protocol.content_key import content_key

if TYPE_CHECKING:
    from dynamo.frontend.pipeline.exchange import Exchange
    from dynamo.frontend.pipeline.outcome import Outcome
    from dynamo.frontend.pipeline.plan import Tally
    from dynamo.protocol.openai.headers import HeaderEffects

RECORDED_BODY_BYTES: Final = 4 * 1024 * 1024  # a longer body is not in its record
BLOCK_TOKENS: Final = 16
MAX_HASHED_TOKENS: Final = 1 << 20
_NEVER: Final = frozenset({"authorization", "x-api-key", "api-key", "cookie", "proxy-authorization", "x-goog-api-key"})
_ENDPOINTS: Final = {
    "chat_completions": "openai.chat_completion",
    "completions": "openai.completion",
    "embeddings": "openai.embedding",
    "messages": "anthropic.message",
    "responses": "openai.response",
}


class RequestRecorder:
    """Records the requests of one process."""

    def __init__(
        self, settings: RequestTraceSettings, redact: Redact | None, dropped: Callable[[str, int], None]
    ) -> None:
        """`dropped`: see `TraceWriter`."""
        self._settings = settings
        self._writer = TraceWriter(settings, redact, dropped)
        self._headers = frozenset(name.lower() for name in settings.headers) - _NEVER
        self._draw = random.Random().random

    @property
    def held_bytes(self) -> int:
        """How long a body may be that is to be held until its request ends."""
        return RECORDED_BODY_BYTES if self._settings.has_content else 0

    def begin(self, exchange: Exchange, request: Any, effects: HeaderEffects) -> RequestTap | None:
        """Return what notes the answer to a request that was understood; None: it is not in the sample."""
        if not self._is_drawn():
            return None
        settings = self._settings
        follows = settings.has_streams or settings.has_content
        return RequestTap(
            request, effects.agent_context, exchange.arrival.at, follows=follows, keeps_content=settings.has_content
        )

    def ended(self, exchange: Exchange, outcome: Outcome, held: bytes) -> None:
        """Record a request that has ended. `held`: its body; empty: it was too long to be held."""
        work = exchange.work
        tap = None if work is None else work.tap
        if (tap is None and (work is not None or not self._is_drawn())) or (tap is not None and not tap.is_recorded):
            return
        received_ms = (time.time() - (exchange.now() - exchange.arrival.at)) * 1000
        facts = _facts(exchange, outcome.endpoint, outcome.at)
        facts |= {"request_received_ms": int(received_ms), "http_status": outcome.status}
        if outcome.error_type:
            facts["error_type"] = outcome.error_type
        if outcome.message is not None and self._settings.has_content:
            facts["error"] = outcome.message
        pairs = exchange.arrival.header_pairs
        prompt: Sequence[int] = work.plan.prompts[0] if work is not None and work.plan.prompts else ()
        self._writer.put(lambda: self._records(facts, tap, held, pairs, prompt))

    def close(self) -> None:
        """Write the rest. Blocks for up to 5 s."""
        self._writer.close()

    def _is_drawn(self) -> bool:
        ratio = self._settings.sample_ratio
        return ratio >= 1 or self._draw() < ratio

    # -- in the writer's thread ---------------------------------------------------------------------------------------

    def _records(
        self,
        facts: dict[str, Any],
        tap: RequestTap | None,
        held: bytes,
        pairs: Sequence[tuple[bytes, bytes]],
        prompt: Sequence[int],
    ) -> list[dict[str, Any]]:
        kinds, body = self._settings.records, decode_body(held) if held else None
        keys = () if tap is None else _content_keys(tap.request)
        ids = {"request_id": facts["request_id"], "request_received_ms": facts["request_received_ms"]}
        found: list[dict[str, Any]] = []
        if REQUEST_END in kinds:
            request = {**facts, "replay": _hashes(prompt), "parameters": shape_of(body)}
            end: dict[str, Any] = {"event_type": REQUEST_END, "request": request}
            if tap is not None and tap.agent_context is not None:
                end["agent_context"] = tap.agent_context
            found.append(end)
        if REQUEST_STREAM in kinds and tap is not None:
            timing = {**ids, "content_keys": keys, **tap.timing(with_content=self._settings.has_content)}
            found.append({"event_type": REQUEST_STREAM, "stream": timing})
        if REQUEST_PAYLOAD in kinds:
            payload = {
                **ids,
                "endpoint": _ENDPOINTS.get(facts["endpoint"], f"openai.{facts['endpoint']}"),
                "path": facts["path"],
                "model": facts.get("model"),
                "http_status": facts["http_status"],
                "content_keys": keys,
                "http_request_headers": {
                    name: value.decode("latin-1")
                    for name, value in ((name.decode("latin-1"), value) for name, value in pairs)
                    if name in self._headers
                },
                "payload_complete": body is not None,
            }
            if body is not None:
                payload["request"] = body
            if tap is not None and facts["http_status"] == 200:
                payload["response"] = tap.folded() if tap.body is None else decode_body(tap.body)
            found.append({"event_type": REQUEST_PAYLOAD, "payload": payload})
        return found


def _facts(exchange: Exchange, endpoint: str, now: float) -> dict[str, Any]:
    """Return what became of a request; what is not known is left out."""
    arrival, counters, tally = exchange.arrival, exchange.counters, exchange.tally
    facts: dict[str, Any] = {
        "request_id": exchange.context.id(),
        "response_id": exchange.response_id,
        "endpoint": endpoint,
        "path": arrival.path,
        "total_time_ms": _ms(now - arrival.at),
    }
    if arrival.client_request_id is not None:
        facts["x_request_id"] = arrival.client_request_id
    if exchange.identity is not None:
        facts["key_id"] = exchange.identity.id
    if exchange.model is not None:
        facts["model"] = exchange.model
    if exchange.context.trace_id:
        facts["trace_id"] = exchange.context.trace_id
    received, _, _, dispatched, first, _ = exchange.phase_times
    for name, begin, end in (
        ("prefill_wait_time_ms", received, dispatched),
        ("prefill_time_ms", dispatched, first),
        ("ttft_ms", received, first),
    ):
        if begin is not None and end is not None:
            facts[name] = _ms(end - begin)
    if counters is not None:
        facts["stream"] = counters.key[2] == "stream"
    if tally is not None:
        facts |= _what_came(tally)
        if counters is not None and tally.completion_tokens > 1:
            facts["avg_itl_ms"] = _ms(counters.generating_seconds / (tally.completion_tokens - 1))
    return facts


def _what_came(tally: Tally) -> dict[str, Any]:
    facts: dict[str, Any] = {"input_tokens": tally.prompt_tokens, "output_tokens": tally.completion_tokens}
    if tally.cached_tokens is not None:
        facts["cached_tokens"] = tally.cached_tokens
    worker: dict[str, str] = {}
    if tally.prefill_instance_id is not None:
        worker["prefill_worker_id"] = f"{tally.prefill_instance_id:x}"
    if tally.instances:
        worker["decode_worker_id"] = f"{tally.instances[-1].instance_id:x}"
    if worker:
        facts["worker"] = worker
    if tally.finish_reason is not None:
        facts["finish_reason_metadata"] = {"finish_reason": tally.finish_reason}
    if tally.moves:
        facts["migrations"] = len(tally.moves)
    return facts


def _hashes(prompt: Sequence[int]) -> dict[str, Any]:
    """Return the prompt as hashes of its blocks, the unfinished last one included: what the benchmark replays."""
    ids = list(prompt[:MAX_HASHED_TOKENS])
    hashes = sequence_hashes(block_hashes(ids, BLOCK_TOKENS))
    if rest := len(ids) % BLOCK_TOKENS:
        tail = block_hashes(ids[-rest:], rest)
        hashes = sequence_hashes([*block_hashes(ids, BLOCK_TOKENS), *tail])
    return {"trace_block_size": BLOCK_TOKENS, "input_length": len(prompt), "input_sequence_hashes": hashes}


def _content_keys(request: Any) -> tuple[str, ...]:
    """Return the key of a request, or of each prompt of it, as the worker of a recording computes them."""
    if not isinstance(request, msgspec.Struct):
        return ()
    body: Mapping[str, Any] = msgspec.to_builtins(request)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        return tuple([content_key({**body, "prompt": each}) for each in prompt])
    return (content_key(body),)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)

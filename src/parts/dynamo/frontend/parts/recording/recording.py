"""What one frontend keeps of its requests: those that failed, and where it is enabled all, in the schema `dynamo.request.trace.v1`.

The event loop notes when each part of an answer came, and hands a request over once it has ended. All else, from the hashes of
its prompt to the line in the file, happens in the writer's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

import dynamo
from dynamo.frontend.base.failures import FailureRing
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.redaction import Redact, load_redaction
from dynamo.frontend.base.settings.recording import (
    REQUEST_END,
    REQUEST_PAYLOAD,
    REQUEST_STREAM,
    RequestTraceSettings,
)
from dynamo.frontend.http.settings import HttpSettings
from dynamo.frontend.parts.part import Part
from dynamo.frontend.parts.recording.bundles import FailureNotes, KeptBody
from dynamo.frontend.parts.recording.request_shape import decode_body, shape_of
from dynamo.frontend.parts.recording.trace_writer import TraceWriter
from dynamo.frontend.pipeline.exchange import Exchange, PartSlot, tried_models
from dynamo.frontend.pipeline.outcome import Outcome, Reached, RequestListener
from dynamo.frontend.pipeline.plan import Plan
from dynamo.frontend.pipeline.reading import Resolved
from dynamo.frontend.pipeline.tap import TAP, RequestTap
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.protocol.content_key import content_key
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.runtime.observe.metrics import Family
from dynamo.settings.table import without_secrets

if TYPE_CHECKING:
    from dynamo.frontend.pipeline.exchange import Exchange
    from dynamo.frontend.pipeline.outcome import Outcome
    from dynamo.frontend.pipeline.plan import Tally
    from dynamo.protocol.openai.headers import HeaderEffects

logger = logging.getLogger(__name__)

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

_BODY: Final[PartSlot[KeptBody]] = PartSlot("body")
_NO_BODY: Final = KeptBody(0, b"")
FAMILIES: Final = (
    Family(
        "request_trace_dropped_total",
        "counter",
        "Records of the [request trace](recording.md#recordings) that were not written; `reason` is `full` (too many waited), `redaction` (the operator's function failed), `failed` or `unwritable`",
        ("reason",),
    ),
)


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

    def begin(
        self, exchange: Exchange, request: object, effects: HeaderEffects, *, is_drawn: bool = False
    ) -> RequestTap | None:
        """Return what notes the answer to a request that was understood; None: it is not in the sample."""
        if not is_drawn and not self._is_drawn():
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
        facts: JsonObject,
        tap: RequestTap | None,
        held: bytes,
        pairs: Sequence[tuple[bytes, bytes]],
        prompt: Sequence[int],
    ) -> list[JsonObject]:
        kinds, body = self._settings.records, decode_body(held) if held else None
        keys = () if tap is None else _content_keys(tap.request)
        ids = {"request_id": facts["request_id"], "request_received_ms": facts["request_received_ms"]}
        found: list[JsonObject] = []
        if REQUEST_END in kinds:
            request = {**facts, "replay": _hashes(prompt), "parameters": shape_of(body)}
            end: JsonObject = {"event_type": REQUEST_END, "request": request}
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


def _facts(exchange: Exchange, endpoint: str, now: float) -> dict[str, object]:
    """Return what became of a request; what is not known is left out."""
    arrival, counters, tally = exchange.arrival, exchange.counters, exchange.tally
    facts: dict[str, object] = {
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
    if exchange.fallbacks:
        facts |= {"served_by": exchange.served_model, "tried": tried_models(exchange.fallbacks)}
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


def _what_came(tally: Tally) -> dict[str, object]:
    facts: dict[str, object] = {"input_tokens": tally.prompt_tokens, "output_tokens": tally.completion_tokens}
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


def _hashes(prompt: Sequence[int]) -> dict[str, object]:
    """Return the prompt as hashes of its blocks, the unfinished last one included: what the benchmark replays."""
    ids = list(prompt[:MAX_HASHED_TOKENS])
    hashes = sequence_hashes(block_hashes(ids, BLOCK_TOKENS))
    if rest := len(ids) % BLOCK_TOKENS:
        tail = block_hashes(ids[-rest:], rest)
        hashes = sequence_hashes([*block_hashes(ids, BLOCK_TOKENS), *tail])
    return {"trace_block_size": BLOCK_TOKENS, "input_length": len(prompt), "input_sequence_hashes": hashes}


def _content_keys(request: object) -> tuple[str, ...]:
    """Return the key of a request, or of each prompt of it, as the worker of a recording computes them."""
    if not isinstance(request, msgspec.Struct):
        return ()
    body: Mapping[str, object] = msgspec.to_builtins(request)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        return tuple([content_key({**body, "prompt": each}) for each in prompt])
    return (content_key(body),)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class RecordingMetrics:
    """Counts the records that are not written."""

    def __init__(self, families: FrontendFamilies) -> None:
        self._dropped = families.of(FAMILIES).counters("request_trace_dropped_total")

    def dropped(self, reason: str, count: int) -> None:
        """Count records that were not written; `reason` is one of a fixed set. May be called in any thread."""
        self._dropped.labels(reason).inc(count)


class Recording(Part):
    """Listens to each request, and hands it to those that keep it."""

    name: ClassVar[str] = "recording"
    families = FAMILIES
    outlives_models: ClassVar[bool] = True

    def __init__(self, failures: FailureNotes, recorder: RequestRecorder | None = None) -> None:
        """`recorder`: None where only failures are kept."""
        self.failures, self.recorder = failures, recorder
        self._held_bytes = max(failures.held_bytes, 0 if recorder is None else recorder.held_bytes)

    def listeners(self) -> Sequence[RequestListener]:
        return (self,) if self.recorder is None else (self, _Sampling(self.recorder))

    def arrived(self, exchange: Exchange) -> None:
        """Hold the body until the request ends, where it is short enough."""
        body = exchange.arrival.body
        exchange.arrival.kept[_BODY] = KeptBody(len(body), body if len(body) <= self._held_bytes else b"")

    def ended(self, exchange: Exchange, outcome: Outcome) -> None:
        """Note a failure, and record the request."""
        rejected = outcome.rejected
        if rejected is None and self.recorder is None:
            return
        body = exchange.of(_BODY) or _NO_BODY
        if rejected is not None:
            if outcome.reached in (Reached.DOOR, Reached.RESOLVED):
                self.failures.declined(outcome, rejected, exchange.model or "")
                return
            try:
                self.failures.failed(exchange, outcome, rejected, body)
            except Exception:  # its record is still to be written
                logger.exception("no bundle was made of the failed request %s", exchange.name)
        if self.recorder is not None and (rejected is not None or outcome.reached is Reached.ADMITTED):
            self.recorder.ended(exchange, outcome, body.held)

    async def start(self) -> None:
        """Begin to gather the log lines of requests."""
        self.failures.log_lines.attach()

    async def aclose(self) -> None:
        """Write what is still to be written."""
        self.failures.log_lines.detach()
        if self.recorder is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.recorder.close)


class _Sampling(RequestListener):
    """Begins to note the answers to the requests of the sample."""

    def __init__(self, recorder: RequestRecorder) -> None:
        self._recorder = recorder

    def planned(self, exchange: Exchange, resolved: Resolved, plan: Plan) -> None:
        is_again = exchange.work is not None  # for another model: the sample stays, what has come of the first one goes
        if is_again and exchange.of(TAP) is None:
            return
        tap = self._recorder.begin(exchange, resolved.request, resolved.effects, is_drawn=is_again)
        if tap is not None:
            exchange.keep(TAP, tap)


def open_recording(settings: HttpSettings, families: FrontendFamilies) -> Recording:
    """Return what keeps requests.

    Raises InvalidArgument for a redaction that cannot be imported.
    """
    given, trace = settings.recording, settings.request_trace
    redact = load_redaction(trace.redact)
    ring = FailureRing(given.keep_failed, given.keep_failed_bytes, process=lambda: _process(settings))
    failures = FailureNotes(ring, redact, keeps_content=given.keep_failed_content)
    return Recording(
        failures, RequestRecorder(trace, redact, RecordingMetrics(families).dropped) if trace.is_on else None
    )


def _process(settings: HttpSettings) -> Mapping[str, object]:
    """Return what all bundles of this process share: its versions, and the settings that are not the defaults."""
    defaults = without_secrets(type(settings)())
    return {
        "pid": os.getpid(),
        "version": dynamo.__version__,
        "python": platform.python_version(),
        "settings": _differing(without_secrets(settings), defaults),
    }


def _differing(value: object, default: object) -> object:
    """Return the members of nested dictionaries that differ, as JSON values."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value if isinstance(value, bool | int | float | str | None) else str(value)
    return {name: _differing(found, default.get(name)) for name, found in value.items() if found != default.get(name)}

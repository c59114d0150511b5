"""From a request that failed to its line in the `FailureRing` and its bundle there.

A bundle holds what an operator needs to understand a failure without having been there, and what `dynamo replay` needs to
send the request again. It holds no key, no header that could carry one, and no text of the request unless that was enabled.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from dynamo.frontend.base.failures import BUNDLE_SCHEMA, FailedRequest, FailureRing
from dynamo.frontend.base.redaction import Redact
from dynamo.frontend.base.stage_timer import STAGES
from dynamo.frontend.parts.recording.request_shape import content_texts, decode_body, shape_of
from dynamo.frontend.pipeline.exchange import tried_models
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.headers import SERVING_HEADERS
from dynamo.router.dispatch.course import Course, CourseState
from dynamo.router.dispatch.course_log import course_record
from dynamo.router.kv.explain import explain_placement
from dynamo.runtime.observe.logging import fields_of, format_readable

if TYPE_CHECKING:
    from dynamo.frontend.pipeline.exchange import Exchange
    from dynamo.frontend.pipeline.outcome import Outcome
    from dynamo.frontend.pipeline.plan import Tally

logger = logging.getLogger(__name__)

_WINDOW: Final = 12  # characters that are compared at once
_STEP: Final = 4  # so every common run of _WINDOW + _STEP - 1 characters is found
_SHORTEST: Final = 4  # characters of a whole text that is searched for as a word; a shorter one hides too much
_MAX_SHORT: Final = 64  # such texts of one request
_MAX_CONTENT: Final = 256 * 1024  # characters of one request that are compared
_MAX_TEXT: Final = 8192  # characters of one text that are examined; the rest is cut off

SHAPED_BODY_BYTES: Final = 64 * 1024
"""A longer body is not held until the request ends; of a failure, its bundle has the size alone."""
CONTENT_BODY_BYTES: Final = 256 * 1024  # where content is kept
MAX_MESSAGE_CHARACTERS: Final = 1000
MAX_COURSES: Final = 8  # of a bundle: each choice has one, and one for each stage
_HEADERS: Final = frozenset({"anthropic-beta", "anthropic-version", "user-agent"}) | SERVING_HEADERS
_MAX_HEADER: Final = 256
_PHASES: Final = ("received", "admitted", "preprocessed", "dispatched", "streaming")
MAX_REQUESTS: Final = 512
MAX_LINES: Final = 20  # of one request: the last ones
MAX_CHARACTERS: Final = 4000  # of one record, its traceback included: the first and the last ones
_OURS: Final = "dynamo"


class ContentScrubber:
    """Replaces what texts have in common with the content of one request.

    Found is any run of 15 characters, and any whole text of the request from 4 characters on where it stands as a word.
    """

    __slots__ = ("_content", "_short")

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts`: the content."""
        kept, short, left = list[str](), list[str](), _MAX_CONTENT
        for text in texts:
            if left <= 0:
                break
            kept.append(text[:left])
            left -= len(text)
            if _SHORTEST <= len(text) < _WINDOW + _STEP and len(short) < _MAX_SHORT:
                short.append(re.escape(text.strip()))
        self._content = "\0".join(kept)
        short.sort(key=len, reverse=True)
        self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)") if short else None

    def clean(self, text: str) -> str:
        """Return the text without what is content."""
        text = text[:_MAX_TEXT]
        if not self._content:
            return text
        content, parts, done, at = self._content, list[str](), 0, 0
        while at + _WINDOW <= len(text):
            found = content.find(text[at : at + _WINDOW])
            if found < 0:
                at += _STEP
                continue
            start, end = self._extend(text, at, found, done)
            parts += [text[done:start], f"[{end - start} characters of the request]"]
            done = at = end
        cleaned = "".join([*parts, text[done:]])
        return cleaned if self._short is None else self._short.sub("[text of the request]", cleaned)

    def _extend(self, text: str, at: int, found: int, done: int) -> tuple[int, int]:
        """Return the ends of the common run that holds the window at `at`, which the content has at `found`."""
        content = self._content
        start, before = at, found
        while start > done and before and text[start - 1] == content[before - 1]:
            start, before = start - 1, before - 1
        end, behind = at + _WINDOW, found + _WINDOW
        while end < len(text) and behind < len(content) and text[end] == content[behind]:
            end, behind = end + 1, behind + 1
        return start, end


class KeptBody(Struct, frozen=True):
    """The body of a request, for what is kept of it."""

    size: int
    held: bytes  # empty: it was too long to be held until the request ends


class FailureNotes:
    """What the pipeline reports failures to."""

    def __init__(self, ring: FailureRing, redact: Redact | None = None, *, keeps_content: bool = False) -> None:
        """`keeps_content`: bundles hold the whole body of their request, as far as `redact` leaves it."""
        self.ring, self._redact = ring, redact
        self.log_lines = RequestLogLines()
        self._keeps_content = keeps_content
        self.held_bytes = CONTENT_BODY_BYTES if keeps_content else SHAPED_BODY_BYTES
        """How long a body may be that is to be held until its request ends."""

    def declined(self, outcome: Outcome, rejected: RequestRejected, model: str = "") -> None:
        """Count a request that was turned away before anything was done for it."""
        self.ring.count(
            FailedRequest(
                id="",
                request_id="",
                at_ms=self.ring.now_ms(),
                status=rejected.status,
                error_type=outcome.error_type,
                code=rejected.code or "",
                endpoint=outcome.endpoint,
                model=model,
                message=rejected.message[:MAX_MESSAGE_CHARACTERS],
            )
        )

    def failed(self, exchange: Exchange, outcome: Outcome, rejected: RequestRejected, kept: KeptBody) -> None:
        """Note a request that failed."""
        held = kept.held if len(kept.held) <= self.held_bytes else b""
        decoded = decode_body(held) if held else None
        clean = _as_it_is if self._keeps_content else ContentScrubber(content_texts(decoded)).clean
        why = rejected if outcome.why is None else outcome.why
        failure = FailedRequest(
            id=exchange.response_id,
            request_id=exchange.request_id,
            at_ms=self.ring.now_ms(),
            status=rejected.status,
            error_type=outcome.error_type,
            code=rejected.code or "",
            endpoint=outcome.endpoint,
            model=exchange.model or "",
            worker=_worker_of(exchange.tally),
            key_id="" if exchange.identity is None else exchange.identity.id,
            message=clean(_what_went_wrong(why, rejected))[:MAX_MESSAGE_CHARACTERS],
        )
        lines = self.log_lines.take(exchange.context.id())
        body = {"body_bytes": kept.size, **self._body(decoded, held)}

        def make() -> dict[str, object] | None:
            bundle = self._bundle(exchange, failure, rejected, body, lines, clean)
            return self._redacted(bundle) if self._redact is not None and self._keeps_content else bundle

        self.ring.add(failure, make)

    def _redacted(self, bundle: dict[str, object]) -> dict[str, object] | None:
        """Return what the operator's function leaves of a bundle with content; None: it is not kept."""
        assert self._redact is not None
        try:
            return self._redact(bundle)
        except Exception as error:
            # Whatever it meant to take out is still in there, and may be in the error's text, too.
            logger.error("a bundle was dropped, because the redaction failed for it with %s", type(error).__name__)
            return None

    def _bundle(
        self,
        exchange: Exchange,
        failure: FailedRequest,
        rejected: RequestRejected,
        body: Mapping[str, object],
        lines: Iterable[str],
        clean: Callable[[str], str],
    ) -> dict[str, object]:
        arrival, began, now = exchange.arrival, exchange.arrival.at, exchange.now()
        found: dict[str, object] = {
            "schema": BUNDLE_SCHEMA,
            "id": failure.id,
            "request_id": failure.request_id,
            "at_ms": failure.at_ms,
            "elapsed_ms": _ms(now - began),
            "error": {
                "status": failure.status,
                "code": failure.code or None,
                "type": failure.error_type,
                "message": failure.message,
                "answered": clean(rejected.message)[:MAX_MESSAGE_CHARACTERS],
            },
            "request": {
                "path": arrival.path,
                "endpoint": failure.endpoint,
                "model": exchange.model,
                "tried": tried_models(exchange.fallbacks) or None,
                "key_id": failure.key_id or None,
                "headers": _headers(arrival.header_pairs),
                **body,
            },
            "phases_ms": {
                name: _ms(at - began)
                for name, at in zip(_PHASES, exchange.phase_times, strict=False)
                if at is not None
            },
            "stages_ms": {
                name: _ms(seconds) for name, seconds in zip(STAGES, exchange.timer.seconds, strict=True) if seconds
            },
            "log": [clean(line) for line in lines],
        }  # fmt: skip
        if exchange.context.trace_id:
            found["trace_id"] = exchange.context.trace_id
        if (tally := exchange.tally) is not None:
            found |= _what_came(tally, began, clean)
        return found

    def _body(self, decoded: object, held: bytes) -> dict[str, object]:
        """Return the body as far as it may be kept, and how far that is."""
        if not held:
            return {"content": "too_long"}
        if self._keeps_content:
            if decoded is not None:
                return {"content": "whole", "body": decoded}
            return {"content": "whole", "body_text": held.decode("utf-8", "replace")}
        shape = shape_of(decoded)
        return {"content": "not_json"} if shape is None else {"content": "omitted", "body": shape}


def _what_came(tally: Tally, began: float, clean: Callable[[str], str]) -> dict[str, object]:
    """Return the tokens, the workers that were tried, and why these were chosen."""
    attempts: list[dict[str, object]] = [
        {
            "stage": failed.stage,
            "worker": f"{failed.placement.candidate.instance_id:x}",
            "outcome": "failed",
            "at_ms": _ms(failed.at - began),
            "error": f"{failed.error_kind}: {clean(failed.error_message)[:MAX_MESSAGE_CHARACTERS]}",
            "tokens": failed.tokens,
        }
        for failed in tally.failed_attempts
    ]
    chosen: dict[str, object] = {
        stage: explain_placement(made)
        for stage, made in (("prefill", tally.prefill_placement), ("generate", tally.placement))
        if made is not None
    }
    for failed in tally.failed_attempts:
        chosen.setdefault(failed.stage, explain_placement(failed.placement))
    found: dict[str, object] = {
        "tokens": {"input": tally.prompt_tokens, "output": tally.completion_tokens, "cached": tally.cached_tokens},
        "workers": [f"{instance.instance_id:x}" for instance in tally.instances],
        "attempts": attempts,
        "moves": [
            {"after_first_token": move.is_ongoing, "outcome": move.outcome, "ms": _ms(move.seconds)}
            for move in tally.moves
        ],
        "routing": chosen,
        "courses": msgspec.to_builtins([course_record(each, clean) for each in _telling(tally.courses)]),
    }  # fmt: skip
    if tally.queued_seconds:
        found["queued_ms"] = _ms(tally.queued_seconds)
    return found


def _telling(courses: Sequence[Course]) -> Sequence[Course]:
    """Return the courses that a bundle keeps: those that failed before the others, in their order."""
    return sorted(courses, key=lambda course: course.state is not CourseState.FAILED)[:MAX_COURSES]


def _what_went_wrong(error: BaseException, rejected: RequestRejected) -> str:
    """Return the failure in the words of an operator: clients do not get what went wrong inside."""
    if isinstance(error, RequestRejected):
        return rejected.message
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _worker_of(tally: Tally | None) -> str:
    """Return the worker that failed last, or else the one that answered last; empty where no worker had the request."""
    if tally is None:
        return ""
    if tally.failed_attempts:
        return f"{tally.failed_attempts[-1].placement.candidate.instance_id:x}"
    return f"{tally.instances[-1].instance_id:x}" if tally.instances else ""


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return the headers that decide how a request is served, and name its client's library. Never one with a key."""
    return {
        name: value[:_MAX_HEADER].decode("latin-1")
        for name, value in ((name.decode("latin-1"), value) for name, value in pairs)
        if name in _HEADERS
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _as_it_is(text: str) -> str:
    return text


class RequestLogLines(logging.Handler):
    """Keeps records from WARNING on that belong to a request. May be called in any thread.

    It is attached to our own loggers, so what an engine's libraries log without a request's fields is not in it.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: OrderedDict[str, deque[str]] = OrderedDict()

    def attach(self) -> None:
        """Begin to keep lines. Idempotent."""
        logging.getLogger(_OURS).addHandler(self)

    def detach(self) -> None:
        """Keep no more lines. Idempotent."""
        logging.getLogger(_OURS).removeHandler(self)

    def take(self, request_id: str) -> list[str]:
        """Return the lines of a request, and forget them."""
        with self.lock or logging.Lock():  # type: ignore[attr-defined]
            return list(self._lines.pop(request_id, ()))

    def emit(self, record: logging.LogRecord) -> None:
        request_id = fields_of(record).get("request_id")
        if not isinstance(request_id, str):
            return
        line = format_readable(record)
        if len(line) > MAX_CHARACTERS:
            half = MAX_CHARACTERS // 2
            line = f"{line[:half]} ...(cut)... {line[-half:]}"
        lines = self._lines.get(request_id)
        if lines is None:
            if len(self._lines) >= MAX_REQUESTS:
                self._lines.popitem(last=False)
            lines = self._lines[request_id] = deque(maxlen=MAX_LINES)
        lines.append(line)

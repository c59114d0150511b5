"""Is this worker able to serve: the state that probes read, and the canary that keeps it honest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from dynamo.runtime.base.settings import CanarySettings
from dynamo.runtime.base.tasks import Background
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import Handler

logger = logging.getLogger(__name__)

MAX_ENDPOINTS: Final = 1024


@dataclass(slots=True)
class _Endpoint:
    """How one endpoint is."""

    is_ready: bool
    reason: str  # why it is not
    is_probed: bool  # by a canary
    is_withdrawn: bool = False  # it takes no requests


class HealthState:
    """The readiness of each endpoint and of the whole process. Not thread-safe except for reading.

    The whole is ready when
    1. all endpoints that gave a health check payload are ready, if any endpoint gave one; else
    2. `set_health_status` (or an explicit starting status) made it ready, if either was given; else
    3. there is an endpoint, and all are ready.

    The native system has no rule 3: there a worker whose endpoints have no payload answers `notready` for ever unless
    it calls `set_health_status(True)`. Setting `DYN_SYSTEM_STARTING_HEALTH_STATUS=notready` gives that behaviour.
    """

    def __init__(
        self,
        *,
        starting_ready: bool | None = None,
        canary_enabled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`starting_ready` None: not configured; see rule 3."""
        self._told = starting_ready
        self._canary_enabled = canary_enabled
        self._clock = clock
        self._began = clock()
        self._endpoints: dict[str, _Endpoint] = {}  # by path
        self._shutting_down = False
        self._troubles: list[Callable[[], str | None]] = []
        self._details: dict[str, Callable[[], Mapping[str, object] | None]] = {}

    @property
    def canary_enabled(self) -> bool:
        return self._canary_enabled

    def register(self, path: str, *, has_payload: bool = False) -> None:
        """Register an endpoint ("ns.comp.ep") that serves from now on: ready, unless a canary must see it answer
        first.
        """
        if path not in self._endpoints and len(self._endpoints) >= MAX_ENDPOINTS:
            raise ValueError(f"more than {MAX_ENDPOINTS} endpoints in one process")
        is_ready = not (has_payload and self._canary_enabled)
        reason = f"{path}: the health check has not seen it answer yet"
        self._endpoints[path] = _Endpoint(is_ready, reason, has_payload)

    def unregister(self, path: str) -> None:
        """Mark an endpoint as taking no more requests; it stays listed as notready until it is registered again."""
        self.set_ready(path, False, "it takes no requests now")
        if (endpoint := self._endpoints.get(path)) is not None:
            endpoint.is_withdrawn = True

    def set_ready(self, path: str, ready: bool, reason: str = "it was reported so") -> None:
        """Set an endpoint's readiness as a canary or real traffic observed it. An endpoint that is not registered, or no
        longer, is ignored: the requests that it still has end well.
        """
        if (endpoint := self._endpoints.get(path)) is not None and not endpoint.is_withdrawn:
            endpoint.is_ready, endpoint.reason = ready, f"{path}: {reason}"

    def add_trouble(self, trouble: Callable[[], str | None]) -> None:
        """Make the process not ready while `trouble()` returns a reason; it is called at every probe, in any thread."""
        self._troubles.append(trouble)

    def add_detail(self, name: str, detail: Callable[[], Mapping[str, object] | None]) -> None:
        """Show what `detail()` returns as member `name` of the answer; an empty mapping or None is left out."""
        self._details[name] = detail

    def is_ready(self, path: str) -> bool:
        endpoint = self._endpoints.get(path)
        return endpoint is not None and endpoint.is_ready

    def set_health_status(self, ready: bool) -> None:
        """Set the worker's own status for the whole process (rule 2)."""
        self._told = ready

    def begin_shutdown(self) -> None:
        """Report not ready from here on, whatever the endpoints' states are."""
        self._shutting_down = True

    def system_ready(self) -> bool:
        """Return the verdict: the three rules, unless the process is shutting down or its work stands still."""
        return self.reason() is None

    def reason(self) -> str | None:
        """Return why the process is not ready; None: it is ready."""
        if self._shutting_down:
            return "the process is shutting down"
        for trouble in self._troubles:
            if (found := trouble()) is not None:
                return found
        endpoints = tuple(self._endpoints.values())
        probed = [each for each in endpoints if each.is_probed]
        if probed or self._told is None:
            if not endpoints:
                return "no endpoint is served yet"
            return next((each.reason for each in probed or endpoints if not each.is_ready), None)
        return None if self._told else "the process was reported not ready, or has not been reported ready yet"

    def body(self) -> dict[str, object]:
        """Return the body of `/health` and `/live`. Endpoints go by their last name; of two equal names the worse
        one shows.
        """
        endpoints: dict[str, bool] = {}
        for path, endpoint in tuple(self._endpoints.items()):
            name = path.rpartition(".")[2]
            endpoints[name] = endpoints.get(name, True) and endpoint.is_ready
        uptime = self._clock() - self._began
        seconds = int(uptime)
        reason = self.reason()
        body: dict[str, object] = {
            "status": _word(reason is None),
            "uptime": {"secs": seconds, "nanos": int((uptime - seconds) * 1e9)},
            "endpoints": {name: _word(ready) for name, ready in endpoints.items()},
        }
        if reason is not None:
            body["reason"] = reason
        for name, detail in self._details.items():
            if found := detail():
                body[name] = dict(found)
        return body


def _word(ready: bool) -> str:
    return "ready" if ready else "notready"


DRAIN_SECONDS: Final = 60.0  # a probe is one short request; one that still talks after a minute is cut, not failed
CANCEL_SECONDS: Final = 1.0  # for a cancelled handler to unwind; an engine that swallows it is left behind, and named


class _Probed(NamedTuple):
    """What a canary calls."""

    path: str
    handler: Handler
    payload: dict[str, object]


class Canary:
    """Requests one small answer of an idle endpoint, through its own handler, and writes the result into `HealthState`.

    The first item without an error makes the endpoint ready (after a failure: the first whole answer). An error, an empty stream or `timeout_seconds` without
    progress (also after the first item: an engine that stalls after its first token is not healthy) make it notready.
    Real traffic that succeeds counts as a probe, so a busy engine is never probed, and a probe that starves behind
    real answers is no failure.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        payload: Mapping[str, object],
        health: HealthState,
        settings: CanarySettings,
    ) -> None:
        self._probed = _Probed(path, handler, dict(payload))
        self._health = health
        self._settings = settings
        self._last_success = float("-inf")  # loop time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work = Background()
        self._probes = 0
        self._failed = False  # the last probe

    def start(self) -> None:
        """Begin to probe, on the running loop; the first probe comes after one wait. `close` ends it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._last_success = self._loop.time()
            self._work.keep(self._run, f"canary {self._probed.path}")

    async def close(self) -> None:
        """Stop probing; a probe under way is cancelled. Idempotent."""
        await self._work.close()

    def activity(self) -> None:
        """Record a good item, or a good end, of a real request. Cheap: call it once per wake-up or per request."""
        if self._loop is not None:
            self._last_success = self._loop.time()
            if not self._health.is_ready(self._probed.path):
                self._health.set_ready(self._probed.path, True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        wait = self._settings.wait_seconds
        due = self._last_success + wait
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self._last_success + wait > loop.time():
                due = self._last_success + wait  # a request was served meanwhile
                continue
            began = loop.time()
            reason = await self._probe()
            self._failed = reason is not None
            if reason is None:
                self._health.set_ready(self._probed.path, True)
            elif self._last_success < began:
                if self._health.is_ready(self._probed.path):
                    logger.warning("health check of %s failed: %s", self._probed.path, reason)
                self._health.set_ready(self._probed.path, False, f"the health check failed: {reason}")
            due = loop.time() + wait

    async def _probe(self) -> str | None:
        """Send one request; return None when it went well, else what was wrong. Marks ready at the first good item."""
        self._probes += 1
        context = Context(f"health-check-{self._probed.path}-{self._probes}")
        sink = _ProbeSink()
        loop = asyncio.get_running_loop()
        request = Background()
        request.start(
            _serve(self._probed.handler, dict(self._probed.payload), context, sink), f"probe {self._probed.path}"
        )
        began = loop.time()
        try:
            while True:
                seen = sink.items
                if not await sink.progress(self._settings.timeout_seconds) and not sink.ended:
                    return f"no {'further ' if seen else ''}item within {self._settings.timeout_seconds} s"
                if sink.failure is not None:
                    return sink.failure
                if sink.items and not self._failed:  # after a failure only a whole answer counts, or it would flap
                    self._health.set_ready(self._probed.path, True)
                if sink.ended:
                    return None if sink.items else "the stream ended without an item"
                if loop.time() - began > DRAIN_SECONDS:
                    logger.warning("health check of %s still runs after %s s: cut", self._probed.path, DRAIN_SECONDS)
                    return None
        finally:
            if request:
                context.kill()
            if await request.close(CANCEL_SECONDS):
                logger.error("the handler of %s ignores its cancellation", self._probed.path)


async def _serve(handler: Handler, body: object, context: Context, sink: _ProbeSink) -> None:
    try:
        await handler(body, context, sink)
    except Exception as error:  # the boundary: a probe reports, it never raises
        sink.end(error)
    else:
        sink.end()


class _ProbeSink:
    """A `ResponseSink` that keeps nothing but the verdict."""

    request_bytes = response_bytes = 0  # a probe comes over no wire

    def __init__(self) -> None:
        self.items = 0
        self.failure: str | None = None
        self._ended = False
        self._moved = asyncio.Event()

    def send_tokens(
        self, token_ids: list[int], index: int = 0, finish_reason: object = None, extra: dict[str, object] | None = None
    ) -> None:
        if isinstance(finish_reason, Mapping) or (isinstance(finish_reason, str) and finish_reason.startswith("error")):
            self._fail(f"the engine answered with finish reason {finish_reason!r}")
        self._move(item=True)

    def send_token(self, token_id: int) -> bool:
        self._move(item=True)
        return not self._ended

    def send_object(self, envelope: dict[str, object]) -> None:
        if envelope.get("event") == "error":
            self._fail(f"the engine answered with an error: {envelope.get('comment') or envelope.get('data')}")
        else:
            data = envelope.get("data")
            finish_reason = data.get("finish_reason") if isinstance(data, Mapping) else None
            if finish_reason == "error" or isinstance(finish_reason, Mapping):
                self._fail(f"the engine answered with finish reason {finish_reason!r}")
        self._move(item=True)

    def has_credit(self) -> bool:
        return True

    async def wait_credit(self) -> None:
        return

    def end(self, error: BaseException | None = None) -> None:
        if not self._ended:
            if error is not None:
                self._fail(f"{type(error).__name__}: {error}")
            self._ended = True
            self._move(item=False)

    @property
    def ended(self) -> bool:
        return self._ended

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def _move(self, *, item: bool) -> None:
        self.items += item
        self._moved.set()

    async def progress(self, timeout: float) -> bool:
        """Wait for an item or the end; False when neither came in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._moved.wait()
        except TimeoutError:
            return False
        self._moved.clear()
        return True

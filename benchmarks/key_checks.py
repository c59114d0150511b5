"""What a request with a key pays for beyond one without: each step, in microseconds of processor time.

    python benchmarks/key_checks.py

Measured in this process without sockets: the least of many rounds, which is what the work takes when nothing else runs.
The key has two rates, places and a budget, and its usage is counted; alone, and in a group of four processes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from starlette.types import ASGIApp

from dynamo.frontend.admission.process import Admission
from dynamo.frontend.base.access import IDENTITY, Access, check_access
from dynamo.frontend.base.metrics.families import FrontendFamilies
from dynamo.frontend.base.metrics.requests import RequestSeries
from dynamo.frontend.base.settings.keys import KeySources
from dynamo.frontend.base.shares import Shares
from dynamo.frontend.base.stage_timer import StageTimer
from dynamo.frontend.http.inference_route import EXCHANGE, AsgiSink
from dynamo.frontend.models.model_limits import LengthLimits
from dynamo.frontend.parts.keys.access_log import AccessLog
from dynamo.frontend.parts.keys.door import KeyDoor
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.key_store import KeyStore
from dynamo.frontend.parts.keys.limit_table import LimitTable
from dynamo.frontend.parts.keys.line_file import LineFile
from dynamo.frontend.parts.keys.metrics import KeyMetrics
from dynamo.frontend.parts.keys.part import CHARGE, PLACE_OF, KeyCharges, PlaceShares, reserve_tokens, show_limits
from dynamo.frontend.parts.keys.quotas import Charge, Quotas, TokenUse
from dynamo.frontend.parts.keys.rules.key_file import key_toml
from dynamo.frontend.parts.keys.rules.key_text import hash_of, key_text
from dynamo.frontend.parts.keys.rules.records import KeyRecord, KeyRing
from dynamo.frontend.parts.keys.usage_store import UsageMeter, UsageStore
from dynamo.frontend.pipeline.exchange import Arrival, Exchange
from dynamo.frontend.pipeline.outcome import Outcome, Reached, TokensTaken
from dynamo.frontend.pipeline.plan import Plan, Tally
from dynamo.frontend.pipeline.reading import bind_key
from dynamo.protocol.dialect import OPENAI
from dynamo.protocol.openai.requests import ChatRequest
from dynamo.protocol.worker_request import PlannedRequest, StopFields
from dynamo.runtime.http.cycle import RESPOND_EXTENSION
from dynamo.runtime.observe.metrics import MetricsRegistry

BAR: Final = 15.0  # microseconds for all that a key costs, without the access log
ROUNDS: Final = 60
PER_ROUND: Final = 500
KEYS: Final = 1000
LIMITS: Final = {
    "limits": {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrent": 10**6},
    "budget": {"tokens": 10**15, "period": "month"},
}
HEADERS: Final = [(b"host", b"127.0.0.1:8000"), (b"accept", b"application/json"), (b"content-type", b"application/json"), (b"user-agent", b"OpenAI/Python"), (b"accept-encoding", b"gzip"), (b"content-length", b"300")]  # fmt: skip
STEPS: Final = (
    "a charge is made",
    "its route and its model are allowed",
    "a place and a request of its limits",
    "its tokens, and their budget",
    "the rate headers of its answer",
    "what it did not use goes back",
    "what it used is counted",
)


def record(number: int, **members: Any) -> KeyRecord:
    """Make a key of a number."""
    key = key_text(f"key{number}", number.to_bytes(32, "big"))
    return msgspec.convert({"id": f"key{number}", "hash": hash_of(key.encode()), **members}, KeyRecord)


def least(work: Callable[[], object]) -> float:
    """Return the microseconds of one call, in the quickest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(PER_ROUND):
            work()
        best = min(best, time.thread_time() - began)
    return best / PER_ROUND * 1e6


def run(application: ASGIApp, scope: Any) -> None:
    """Have an application serve a request that it does not wait in."""
    try:
        cast(Any, application(scope, cast(Any, None), cast(Any, None))).send(None)
    except StopIteration:
        return
    raise RuntimeError("the application waited")


async def nothing(scope: Any, receive: Any, send: Any) -> None: ...


def door_microseconds(directory: Path) -> float:
    """Return what passing the door costs, beyond calling the application."""
    path = directory / "keys.toml"
    path.write_text("\n".join([key_toml(record(number)) for number in range(KEYS)]))
    store = KeyStore(KeySources(str(path)))
    door = KeyDoor(cast(Any, nothing), store, is_open=frozenset({"/health", "/live"}).__contains__)
    key = b"Bearer " + key_text("key7", (7).to_bytes(32, "big")).encode()

    def call(target: Any) -> Callable[[], None]:
        def work() -> None:
            headers = [*HEADERS, (b"authorization", key)]
            run(target, {"type": "http", "path": "/v1/chat/completions", "headers": headers})

        return work

    return least(call(door)) - least(call(nothing))


class NoStore:
    """Stands for the file of the usage, which another thread writes once a second."""


def step_microseconds(table: LimitTable, **members: Any) -> Sequence[float]:
    """Return what each of the `STEPS` costs."""
    one = record(1, **members)
    ring = KeyRing(keys=(one,))
    quotas, identity = Quotas(lambda: ring, table), Identity(one)
    meter = UsageMeter(
        quotas,
        KeyMetrics(FrontendFamilies(MetricsRegistry(), "benchmark", {})),
        cast(UsageStore, NoStore()),
        keep_days=1,
        identities=lambda: [identity],
    )
    count, quotas.on_closed = meter.count, lambda *_: None
    plan, used = Plan(PlannedRequest(StopFields(200)), [[7] * 100]), TokenUse(100, 0, 150)
    sink, scope = AsgiSink({}, cast(Any, None), "0123456789abcdef"), {IDENTITY: identity}
    shares = Shares()
    shares.know_owners(lambda: 2)
    places = PlaceShares(Admission(4096), shares)
    charges_of, answered = (
        KeyCharges(quotas, places),
        Outcome("chat_completions", 0.1, Reached.ADMITTED, usage=TokensTaken(100, 0, 150)),
    )
    request, exchange, limits = ChatRequest(model="model", messages=[]), answered_exchange(), LengthLimits(8192, 8192)

    sink.exchange = exchange

    def headers(charge: Charge) -> object:
        exchange.keep(CHARGE, charge)
        show_limits(exchange, charge)
        return sink._fixed()

    def allow(charge: Charge) -> None:
        check_access(scope, Access.INFERENCE)
        bind_key(request, charge.identity, OPENAI)

    def enter(charge: Charge) -> None:
        charge.check_requests()
        places.take(identity.owner)
        charge.enter("model")

    def close(charge: Charge) -> None:
        exchange.keep(CHARGE, charge)
        exchange.keep(PLACE_OF, identity.owner)
        charges_of.ended(exchange, answered)

    works: Sequence[Callable[[Charge], object]] = (
        allow,
        enter,
        lambda charge: reserve_tokens(charge, plan, limits),
        headers,
        close,
        lambda charge: count(charge, used, 0.1),
    )
    best = [float("inf")] * len(STEPS)
    for _ in range(ROUNDS):
        began = time.thread_time()
        charges = [quotas.open(identity, "chat_completions") for _ in range(PER_ROUND)]
        best[0] = min(best[0], time.thread_time() - began)
        for step, work in enumerate(works, 1):
            began = time.thread_time()
            for charge in charges:
                work(charge)
            best[step] = min(best[step], time.thread_time() - began)
    return [seconds / PER_ROUND * 1e6 for seconds in best]


def answered_exchange() -> Exchange:
    """Return a request that was answered."""
    exchange = Exchange("0123456789abcdef", Arrival(b"", 0.0), StageTimer(is_wanted=False))
    exchange.model = "model"
    series = RequestSeries(FrontendFamilies(MetricsRegistry(), "benchmark", {}))
    exchange.counters = series.begin("model", "chat_completions", "stream", 0.0)
    tally = Tally(100)
    exchange.work = cast(Any, type("Work", (), {"tally": tally}))
    tally.completion_tokens, tally.finish_reason = 150, "stop"
    return exchange


def access_log_microseconds(directory: Path) -> float:
    """Return what a line of the access log costs, without its writing."""
    file, identity, exchange = LineFile(str(directory / "access.log")), Identity(record(1)), answered_exchange()
    extra = [
        (b"content-length", b"300"),
        (b"x-request-id", b"0123456789abcdef"),
        (b"content-type", b"application/json"),
    ]

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        if EXCHANGE in scope:
            scope[EXCHANGE] = exchange
        scope["dynamo.identity"] = identity
        scope["extensions"][RESPOND_EXTENSION](200, extra, b"")

    def call(target: Any) -> Callable[[], None]:
        def work() -> None:
            extensions = {RESPOND_EXTENSION: lambda status, headers, body: True}
            scope = {"type": "http", "path": "/v1/chat/completions", "method": "POST", "headers": HEADERS}
            run(target, {**scope, "client": ("127.0.0.1", 5000), "extensions": extensions})
            file._lines.clear()

        return work

    return least(call(AccessLog(cast(Any, answering), file, trusted=()))) - least(call(answering))


async def main() -> int:
    """Print the table; tell by the status whether the bar was met."""
    with tempfile.TemporaryDirectory() as name:
        door, log = door_microseconds(Path(name)), access_log_microseconds(Path(name))
    plain = sum(step_microseconds(LimitTable()))
    alone, group = step_microseconds(LimitTable(), **LIMITS), step_microseconds(LimitTable.create(4), **LIMITS)
    print("   alone  group  microseconds")
    for what, *costs in ((f"the door, {KEYS} keys", door, door), *zip(STEPS, alone, group, strict=True)):
        print("".join([f"{cost:7.2f}" for cost in costs]), f" {what}")
    sums = [door + sum(steps) for steps in (alone, group)]
    print("".join([f"{cost:7.2f}" for cost in sums]), f" together, bar {BAR}")
    print(f"{door + plain:7.2f}  a key without limits")
    print(f"{log:7.2f}  a line of the access log, with or without keys")
    return 0 if max(sums) <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

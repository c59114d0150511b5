"""What the checks of a key cost one request, in microseconds: the door, then limits and budgets, one after another.

    python benchmarks/key_checks.py

Measured in this process without sockets: the least of many rounds, which is what the work takes when nothing else runs.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from dynamo.access.key_file import key_toml
from dynamo.access.key_text import hash_of, key_text
from dynamo.access.records import KeyRecord, KeyRing
from dynamo.frontend.access.identity import Identity
from dynamo.frontend.access.key_store import KeySources, KeyStore
from dynamo.frontend.admission.limit_table import LimitTable
from dynamo.frontend.admission.quotas import Quotas, TokenDemand, TokenUse
from dynamo.frontend.http.auth import KeyDoor

ROUNDS: Final = 60
PER_ROUND: Final = 500
KEYS: Final = 1000
LIMITS: Final = {
    "limits": {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrent": 10**6},
    "budget": {"tokens": 10**15, "period": "month"},
}
HEADERS: Final = [(b"host", b"127.0.0.1:8000"), (b"accept", b"application/json"), (b"content-type", b"application/json"), (b"user-agent", b"OpenAI/Python"), (b"accept-encoding", b"gzip"), (b"content-length", b"300")]  # fmt: skip


def record(number: int, **members: Any) -> KeyRecord:
    """Make a key of a number."""
    key = key_text(f"key{number}", number.to_bytes(32, "big"))
    return msgspec.convert({"id": f"key{number}", "hash": hash_of(key.encode()), **members}, KeyRecord)


def least(work: Callable[[], None]) -> float:
    """Return the microseconds of one call, in the quickest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(PER_ROUND):
            work()
        best = min(best, time.thread_time() - began)
    return best / PER_ROUND * 1e6


def door_microseconds(directory: Path) -> float:
    """Return what passing the door costs, beyond calling the application."""
    path = directory / "keys.toml"
    path.write_text("\n".join([key_toml(record(number)) for number in range(KEYS)]))
    store = KeyStore(KeySources(str(path)))

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    door = KeyDoor(app, store, is_open=frozenset({"/health", "/live"}).__contains__)
    key = b"Bearer " + key_text("key7", (7).to_bytes(32, "big")).encode()

    def call(target: Any) -> Callable[[], None]:
        def work() -> None:
            scope = {"type": "http", "path": "/v1/chat/completions", "headers": [*HEADERS, (b"authorization", key)]}
            try:
                target(scope, None, None).send(None)
            except StopIteration:
                return
            raise RuntimeError("the door waited")

        return work

    return least(call(door)) - least(call(app))


def charge_microseconds(table: LimitTable, **members: Any) -> float:
    """Return what a charge costs from its beginning to its end."""
    one = record(1, **members)
    ring = KeyRing(keys=(one,))
    quotas, identity = Quotas(lambda: ring, table), Identity(one)

    def work() -> None:
        charge = quotas.open(identity)
        charge.enter("model")
        charge.reserve(TokenDemand(100, 200))
        charge.close(TokenUse(100, 0, 150))

    return least(work)


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        door = door_microseconds(Path(name))
    shared = LimitTable.create(4)
    rows = [
        (f"the door, {KEYS} keys", door),
        ("a key without limits", charge_microseconds(LimitTable())),
        ("a key with two rates, places and a budget", charge_microseconds(LimitTable(), **LIMITS)),
        ("the same, shared by a group of four processes", charge_microseconds(shared, **LIMITS)),
    ]
    for what, cost in rows:
        print(f"{cost:8.2f} us  {what}")


if __name__ == "__main__":
    asyncio.run(asyncio.sleep(0))
    main()

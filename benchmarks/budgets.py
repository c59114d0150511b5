"""`make bench-budgets`: many clients race for one key's budget of tokens, at our frontend and at LiteLLM's proxy.

    .venv/bin/python benchmarks/budgets.py [--gateways "ours;LiteLLM"] [--only kill] [--clients 64]

All stand before one upstream, which counts what it reads and makes (the truth) and runs in the process of the clients.

- overspent: what the upstream made beyond the budget.
- refused wrongly: refusals of a request that would have fitted beside all requests that were running, taken at their largest,
  when it was sent and when its refusal came. After the race requests come one at a time until one is refused.
- unusable: what was left of the budget then.
- errors: answers that are neither whole nor a refusal by the budget; hung: those that did not come within the patience.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("TEST_PATIENCE_SECONDS", "300")  # a proxy takes long to start on a machine that others use

from budgeted import GATEWAYS, Gateway, NotInstalled, Running, Task

from support.counted_upstream import MODEL, PROMPT, PROMPT_TOKENS, CountedUpstream, counted_upstream
from support.http_client import CHAT, DONE, Exchange, ask, exchange

ANSWER_TOKENS: Final = 100
DELAY_SECONDS: Final = 0.01  # of the upstream, for each token
SETTLED_SECONDS: Final = 1.5  # after the last answer a gateway has booked it
PATIENCE_SECONDS: Final = 90.0  # of one answer
RETRY_SECONDS: Final = 0.1
SHARE: Final = 3  # the budget allows the clients' requests divided by this, and half of one
OVER: Final = ("insufficient_quota", "budget_exceeded")  # how a budget refuses, here and there
NOT_READY: Final = 503  # of a frontend that was started again, before it has found its worker
SHORTLY: Final = "rate_limit_exceeded"  # other frontends hold the rest of the budget
STILL_SECONDS: Final = 6.0  # a batch of which nothing was served for so long waits for its budget
MOST_AFTER: Final = 300  # requests that come one at a time after the race


@dataclass(frozen=True)
class Scenario:
    """One group of rows."""

    name: str
    about: str
    choices: int = 1
    rounds: int = 1
    """Requests of each client, unless it is refused before."""
    leaves_after: int | None = None
    """Events after which clients leave."""
    processes: int = 1
    is_killed: bool = False
    is_batch: bool = False

    @property
    def need(self) -> int:
        """The tokens that a request needs at most."""
        return PROMPT_TOKENS + self.choices * ANSWER_TOKENS


SCENARIOS: Final = (
    Scenario("at once", "streams, all at once"),
    Scenario("cut", "streams that clients leave half-way", rounds=4, leaves_after=ANSWER_TOKENS // 2),
    Scenario("n = 4", "streams of four choices", choices=4),
    Scenario("kill", "the frontend is killed in mid-load and started again", rounds=4, is_killed=True),
    Scenario("two", "two processes share the budget", rounds=2, processes=2),
    Scenario("two, kill", "two processes, one of them killed in mid-load", rounds=4, processes=2, is_killed=True),
    Scenario("batch", "a file of requests", is_batch=True),
)


@dataclass
class Seen:
    """What clients have seen, and what runs."""

    served: int = 0
    cut: int = 0
    refused: int = 0
    refused_wrongly: int = 0
    errors: int = 0
    hung: int = 0
    running: dict[int, int] = field(default_factory=dict)  # what each may need
    notes: set[str] = field(default_factory=set)


class Race:
    """The clients of one scenario at one gateway."""

    def __init__(self, scenario: Scenario, gateway: Running, upstream: CountedUpstream, budget: int) -> None:
        self.scenario, self._gateway, self._upstream, self.budget = scenario, gateway, upstream, budget
        self.seen = Seen()
        self._ids = itertools.count()

    def room(self) -> int:
        """Return what is left of the budget when each running request takes all that it may."""
        return self.budget - self._upstream.spent - sum(self.seen.running.values())

    async def client(self, number: int) -> None:
        """Send requests until the budget refuses one."""
        for _ in range(self.scenario.rounds):
            while (outcome := await self.request(number)) == "again":
                await asyncio.sleep(RETRY_SECONDS)
            if outcome == "refused":
                return

    async def request(self, number: int) -> str:
        """Send one request, and count what comes of it."""
        seen, id, need = self.seen, next(self._ids), self.scenario.need
        room = self.room()
        seen.running[id] = need
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                outcome = await self._exchange(number)
        except TimeoutError:
            outcome = "hung"
        except (OSError, EOFError, ValueError) as error:
            outcome = "again" if isinstance(error, ConnectionRefusedError) else "errors"
            seen.notes.add(type(error).__name__)
        finally:
            del seen.running[id]
        if outcome == "refused" and min(room, self.room()) >= need:
            seen.refused_wrongly += 1
        if outcome != "again":
            setattr(seen, outcome, getattr(seen, outcome) + 1)
        return outcome

    async def _exchange(self, number: int) -> str:
        ports, scenario = self._gateway.ports, self.scenario
        body = {**chat_body(scenario), "stream": True}
        async with exchange(ports[number % len(ports)], CHAT, body, headers=self._gateway.headers) as found:
            if await found.head() != 200:
                return self._refused(found, (await found.rest()).decode(errors="replace"))
            events = 0
            while (event := await found.event()) != DONE:
                if "error" in event:
                    return self._refused(found, json.dumps(event))
                events += 1
                if events == scenario.leaves_after:
                    found.leave(politely=False)
                    return "cut"
            return "served"

    def _refused(self, found: Exchange, text: str) -> str:
        if any(code in text for code in OVER):
            return "refused"
        if SHORTLY in text or found.status == NOT_READY:
            return "again"
        self.seen.notes.add(f"{found.status}: {text[:200]}")
        return "errors"

    async def run(self, clients: int) -> None:
        """Race, and use what is left one request at a time."""
        if self.scenario.is_batch:
            await self._batch(clients)
        else:
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self.client(number))
                if self.scenario.is_killed:
                    group.create_task(self._kill())
        await self._settle()
        for number in range(MOST_AFTER):
            if await self.request(number) == "refused":
                break
            await self._settle()

    async def _kill(self) -> None:
        """Kill when a third of the budget is spent, and answers run."""
        while self._upstream.spent < self.budget / 3 or not self._upstream.running:
            await asyncio.sleep(0.005)
        await self._gateway.kill_one()

    async def _settle(self) -> None:
        while self._upstream.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(SETTLED_SECONDS if self.seen.refused < 1 or self.scenario.leaves_after else 0.3)

    async def _batch(self, lines: int) -> None:
        """Send a file of requests, and wait until all have ended."""
        (port, *_), headers = self._gateway.ports, dict(self._gateway.headers)
        asked = [
            {"custom_id": str(number), "method": "POST", "url": CHAT, "body": chat_body(self.scenario)}
            for number in range(lines)
        ]
        text = "".join(json.dumps(line) + "\n" for line in asked)
        edge = "budget-race"
        form = (
            f'--{edge}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{edge}\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{text}\r\n--{edge}--\r\n'
        )
        kind = {"content-type": f"multipart/form-data; boundary={edge}"}
        file = (await ask(port, "/v1/files", form.encode(), headers=headers | kind)).json()
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await ask(port, "/v1/batches", wanted, headers=headers)).json()
        moved_at, spent = time.monotonic(), -1
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            if spent != self._upstream.spent:
                moved_at, spent = time.monotonic(), self._upstream.spent
            elif time.monotonic() > moved_at + STILL_SECONDS:
                # Lines that the budget refuses wait for its next period: for ever, for one of the total.
                await ask(port, f"/v1/batches/{batch['id']}/cancel", {}, headers=headers)
                moved_at = time.monotonic() + PATIENCE_SECONDS
            await asyncio.sleep(0.2)
            batch = (await ask(port, f"/v1/batches/{batch['id']}", headers=headers)).json()
        self.seen.served = batch["request_counts"]["completed"]
        if batch["error_file_id"]:
            failed = await ask(port, f"/v1/files/{batch['error_file_id']}/content", headers=headers)
            for line in failed.body.decode().splitlines():
                is_refused = any(code in line for code in (*OVER, "batch_cancelled"))
                self.seen.refused += is_refused
                self.seen.errors += not is_refused


def chat_body(scenario: Scenario) -> dict[str, Any]:
    """Return a request."""
    message = {"role": "user", "content": PROMPT}
    body: dict[str, Any] = {"model": MODEL, "messages": [message], "max_tokens": ANSWER_TOKENS}
    return body | ({"n": scenario.choices} if scenario.choices > 1 else {})


# -- the table ---------------------------------------------------------------------------------------------------------

HEADS: Final = (
    "Race", "Gateway", "Budget", "Spent", "Booked", "Overspent", "Unusable", "Answered", "Left", "Refused", "Wrongly", "Errors", "Hung",
)  # fmt: skip


async def raced(scenario: Scenario, gateway: Gateway, clients: int) -> dict[str, Any]:
    """Run one scenario at one gateway; the cells of its row."""
    budget = max(1, clients // SHARE) * scenario.need * (2 if scenario.is_killed else 1) + scenario.need // 2
    async with counted_upstream(DELAY_SECONDS) as upstream:
        with tempfile.TemporaryDirectory() as name:
            task = Task(Path(name), upstream.port, budget, scenario.processes)
            # Starting and ending wait for processes, which ask the upstream for its models meanwhile.
            place = gateway.start(task)
            running = await asyncio.to_thread(place.__enter__)
            try:
                race = Race(scenario, running, upstream, budget)
                await race.run(clients)
                spent = upstream.spent
                booked = await running.booked()
            finally:
                await asyncio.to_thread(place.__exit__, None, None, None)
    seen = race.seen
    cells = (
        scenario.name, gateway.name, budget, spent, booked, max(0, spent - budget), max(0, budget - spent),
        seen.served, seen.cut, seen.refused, seen.refused_wrongly, seen.errors, seen.hung,
    )  # fmt: skip
    return dict(zip(HEADS, cells, strict=True)) | {"notes": sorted(seen.notes)}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| " + " | ".join(HEADS) + " |"
    yield "|" + " --- |" * len(HEADS)
    for row in rows:
        yield "| " + " | ".join(f"{row[head]:,}" if isinstance(row[head], int) else row[head] for head in HEADS) + " |"


def main() -> int:
    """Race, print the table, and why rows are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", default="", metavar="NAMES", help="only these, with semicolons between them")
    parser.add_argument("--only", default="", metavar="RACES", help="only these, with semicolons between them")
    parser.add_argument("--clients", type=int, default=64, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where budgets.json goes")
    given = parser.parse_args()
    gateways = _chosen(parser, given.gateways, {one.name: one for one in GATEWAYS})
    scenarios = _chosen(parser, given.only, {one.name: one for one in SCENARIOS})
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for gateway in list(gateways):
        try:
            print(f"{gateway.name}: version {gateway.version()}", file=sys.stderr)
        except NotInstalled as why:
            missing.append(f"{gateway.name} is left out: {why}")
            gateways.remove(gateway)
    for scenario in scenarios:
        for gateway in gateways:
            if scenario.is_batch and not gateway.has_batches:
                missing.append(
                    f"{scenario.name}, {gateway.name}: it passes batches on to a provider that has them, and runs none"
                )
                continue
            print(f"{scenario.name}: {scenario.about}; {gateway.name} ...", file=sys.stderr, flush=True)
            try:
                rows.append(asyncio.run(raced(scenario, gateway, given.clients)))
            except (RuntimeError, OSError, AssertionError) as error:  # the other rows are measured nevertheless
                missing.append(f"{scenario.name}, {gateway.name}: {error}")
                continue
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    print("\n".join([*table(rows), *missing]))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "budgets.json").write_text(json.dumps(rows, indent=1) + "\n")
    own = [row for row in rows if row["Gateway"] == "ours"]
    return 1 if any(row["Overspent"] or row["Hung"] for row in own) else 0


def _chosen(parser: argparse.ArgumentParser, given: str, known: dict[str, Any]) -> list[Any]:
    names = [name.strip() for name in given.split(";") if name.strip()] or list(known)
    if unknown := sorted(set(names) - known.keys()):
        parser.error(f"not there: {', '.join(unknown)}; there are {'; '.join(known)}")
    return [known[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())

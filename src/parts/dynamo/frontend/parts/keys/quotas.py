"""What a request takes of the limits and budgets of its key, its project, and its key with its model.

    charge = quotas.open(identity)      one for each request
    charge.enter(model)                 concurrency, then requests per minute and day
    cap = charge.reserve(tokens)        tokens per minute, then budgets; before any worker gets the request
    charge.close(used)                  gives back what was reserved and not used

Everything a request needs is taken before it runs, so that requests that come together cannot pass a limit that each of
them alone keeps. Nothing here waits: what is not free is refused with a 429 that has when to come again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from dynamo.frontend.base.asgi import HeaderPairs
from dynamo.frontend.parts.keys.gates import BudgetGate, GateBook, Gates, Generation, PlaceGate, RateGate
from dynamo.frontend.parts.keys.identity import Identity
from dynamo.frontend.parts.keys.limit_table import LimitTable, Spent
from dynamo.frontend.parts.keys.pledges import Pledges
from dynamo.frontend.parts.keys.rules.records import KeyRing, Price
from dynamo.frontend.parts.keys.rules.spending import period_end
from dynamo.protocol.dialect import Dialect, RateStatus
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.steady_wall import steady_wall

__all__ = ["Charge", "Quotas", "Spent", "TokenDemand", "TokenUse"]

OUTPUT_ESTIMATE: Final = 1024
"""Output tokens that are reserved for a request that names no limit of its own. Where it generates more, the rest is
charged at its end; a hard budget reserves all that it may generate."""

RETRY_LIMIT_SECONDS: Final = 60  # clients give up on a Retry-After of more than 120 s, and try again at once


class TokenDemand(Struct, frozen=True, gc=False):
    """The tokens that a request may need, before it runs."""

    input: int
    output: int | None  # for each of its answers; None: it names no limit
    answers: int = 1
    most_output: int | None = None  # for each, as far as the model's context goes; None: not known


class TokenUse(Struct, frozen=True, gc=False):
    """The tokens that a request took."""

    input: int = 0
    cached: int = 0  # of the input
    output: int = 0
    reasoning: int = 0  # of the output
    images: int = 0  # that were made


class Quotas:
    """The limits of all keys of a frontend, in one table."""

    def __init__(
        self,
        ring: Callable[[], KeyRing],
        table: LimitTable,
        *,
        spent: Mapping[str, Spent] | None = None,
        pledges: Pledges | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = steady_wall,
    ) -> None:
        """`ring` returns what the key file holds now; `spent`: what budgets had given when this process began, by name.

        `clock` is one that all processes of this machine share, and that never jumps; `wall_clock` has the day.
        """
        self.book = GateBook(ring, table, spent=spent, pledges=pledges, wall_clock=wall_clock)
        self.table = table
        self.clock, self.wall_clock = clock, wall_clock
        self.on_closed: Callable[[Charge, TokenUse, float], None] = lambda *_: None
        """Called with each charge that has ended, what it took, and the seconds that its request took."""
        self.on_refused: Callable[[Identity, str], None] = lambda *_: None
        """Called with the key and the limit's name of each refusal."""
        self.on_spent: Callable[[str, int, int], None] = lambda *_: None
        """Called with what a budget has given more: its name, the number of its period, and the units."""

    def open(self, identity: Identity, endpoint: str = "") -> Charge:
        """Return the charge of one request, which has taken nothing yet."""
        return Charge(self, identity, self.book.of(identity), endpoint)

    def count_refused(self, identity: Identity) -> None:
        """Take a request of the key and its project for one that was refused; a rate that is used up owes nothing more."""
        requests = self.book.of(identity).requests
        if requests:
            now = self.clock()
            with self.table.locked():
                for rate in requests:
                    if rate.wait_seconds(1, now) <= 0.0:
                        rate.take(1, now)

    def price_of(self, model: str) -> Price | None:
        """Return the price of a model in the key file."""
        return self.book.ring().price_of(model)

    def remaining_ratio(self, identity: Identity) -> float | None:
        """Return what is left of the budget of a key, as a part of it; None where it has none."""
        for gate in self.book.of(identity).budgets:
            if gate.scope.startswith("key "):
                with self.table.locked():
                    self.book.turn(gate)
                    left = gate.left_of_whole()
                return max(0.0, left / gate.units)
        return None


class _Reserved(Struct, frozen=True, gc=False):
    """The tokens that were reserved, at which price, and what each budget has reserved for them."""

    input: int
    output: int
    price: Price | None
    costs: Sequence[int]
    is_bound: bool  # the request, or its key, names the most output


class Charge:
    """What one request has taken. `close` ends it, once; later calls do nothing."""

    __slots__ = (
        "_gates", "_generation", "_quotas", "_reserved", "_taken", "endpoint", "has_succeeded", "identity", "model",
    )  # fmt: skip

    def __init__(self, quotas: Quotas, identity: Identity, gates: Gates, endpoint: str) -> None:
        self._quotas, self._gates = quotas, gates
        self._generation: Generation | None = quotas.book.begin_charge()  # None: it is closed
        self.identity, self.endpoint = identity, endpoint
        self.model = ""
        """The model, once it is known."""
        self._taken = False  # a place and a request
        self.has_succeeded = False
        """Whether it was answered in full."""
        self._reserved: _Reserved | None = None

    @property
    def is_limited(self) -> bool:
        """Whether any rate may refuse it, so that its answer has how far the rates are used."""
        return bool(self._gates.requests or self._gates.tokens)

    # -- requests ----------------------------------------------------------------------------------------------------

    def check_requests(self) -> None:
        """Raise the 429 of a rate of requests that has none now, before the request is read. Nothing is taken."""
        if not self._gates.requests:
            return
        now = self._quotas.clock()
        for rate in self._gates.requests:
            if rate.is_used_up(now):
                with self._quotas.table.locked():
                    wait = rate.wait_seconds(1, now)
                if wait > 0.0:
                    raise self._refused(rate.name, _over_rate(rate, wait))

    def enter(self, model: str) -> None:
        """Take a place and a request of every limit. Raises the 429 of the first that has none; then nothing is taken."""
        quotas = self._quotas
        self.model = model
        if self.identity.record.model_limits:
            self._gates = quotas.book.with_model(self.identity, self._gates, model)
        places, requests = self._gates.places, self._gates.requests
        if not places and not requests:
            return
        now, table = quotas.clock(), quotas.table
        lock = table.lock()
        try:
            for place in places:
                if place.is_full():
                    raise self._refused("concurrent", _too_many_at_once(place))
            for rate in requests:
                wait = rate.wait_seconds(1, now)
                if wait > 0.0:
                    raise self._refused(rate.name, _over_rate(rate, wait))
            for place in places:
                place.hold(1)
            for rate in requests:
                rate.take(1, now)
        finally:
            table.unlock(lock)
        self._taken = True

    def forgive(self) -> None:
        """Give back the request, because this frontend had no place for it. The charge still has to be closed."""
        if self._taken:
            now = self._quotas.clock()
            with self._quotas.table.locked():
                for rate in self._gates.requests:
                    rate.settle(1, 0, now)

    def _refused(self, limit: str, rejected: RequestRejected) -> RequestRejected:
        self._quotas.on_refused(self.identity, limit)
        return rejected

    # -- tokens ------------------------------------------------------------------------------------------------------

    def reserve(self, demand: TokenDemand) -> int | None:
        """Reserve the tokens that a request may need, and return how many each of its answers may have at most.

        None: as many as it names. Raises a 400 where the request names more than its key may have in one request,
        and the 429 of a limit or budget that has not enough; then nothing is reserved.
        """
        gates, most = self._gates, self.identity.record.max_tokens
        cap = demand.output if most is None else self._own_cap(demand, most)
        for size in gates.sizes:
            self._check_size(size, demand, cap)
        if not gates.tokens and not gates.budgets:
            return cap
        quotas = self._quotas
        now, table = quotas.clock(), quotas.table
        price = quotas.price_of(self.model) if gates.counts_money else None
        lock = table.lock()
        try:
            for budget in gates.budgets:
                quotas.book.turn(budget)
                if budget.budget.hard:
                    cap = self._affordable(budget, price, demand, cap)
            input, output = demand.input, (_estimate(demand) if cap is None else cap) * demand.answers
            for rate in gates.tokens:
                wait = rate.wait_seconds(rate.units(input, output), now)
                if wait > 0.0:
                    raise self._refused(rate.name, _over_rate(rate, wait))
            costs = self._checked_costs(price, input, output) if gates.budgets else ()
            for rate in gates.tokens:
                rate.take(rate.units(input, output), now)
            for index, budget in enumerate(gates.budgets):
                budget.hold(costs[index])
        finally:
            table.unlock(lock)
        self._reserved = _Reserved(input, output, price, costs, is_bound=cap is not None)
        return cap

    def at_most(self, output: int) -> int:
        """Return a number of output tokens, but no more than its answers could have."""
        reserved = self._reserved
        return output if reserved is None or not reserved.is_bound else min(output, reserved.output)

    def _checked_costs(self, price: Price | None, input: int, output: int) -> Sequence[int]:
        """Return what each budget has to reserve. Raises the 429 of the first that has not enough."""
        costs: list[int] = []
        for budget in self._gates.budgets:
            cost = budget.cost(price, input, 0, output)
            if cost > budget.left():
                raise self._over_budget(budget, cost)
            costs.append(cost)
        return costs

    def _own_cap(self, demand: TokenDemand, most: int) -> int:
        """Return the output limit of each answer by the request and the key. Raises the 400 of a request for too much."""
        if demand.output is not None and demand.output > most:
            raise self._refused(
                "max_tokens",
                RequestRejected(
                    400,
                    f"This API key may have {most} output tokens in an answer, and the request asks for {demand.output}",
                    param="max_tokens",
                    code="max_tokens_exceeded",
                ),
            )
        return most if demand.output is None else demand.output

    def _check_size(self, most: int, demand: TokenDemand, cap: int | None) -> None:
        size = demand.input + (_estimate(demand) if cap is None else cap) * demand.answers
        if size > most:
            raise self._refused(
                "max_tokens_per_request",
                RequestRejected(
                    400,
                    f"This API key may have {most} tokens of input and output in one request, and this one needs {size}",
                    param="max_tokens",
                    code="max_tokens_per_request_exceeded",
                ),
            )

    def _affordable(self, gate: BudgetGate, price: Price | None, demand: TokenDemand, cap: int | None) -> int | None:
        """Return the output limit that a hard budget leaves, under the lock. Raises the 429 of one that leaves none."""
        # What a million tokens cost is exact also where one token costs less than a unit.
        million = gate.cost(price, 0, 0, 10**6)
        if million == 0:
            return cap
        left = gate.left() - gate.cost(price, demand.input, 0, 0)
        most = left * 10**6 // million // demand.answers
        if most < 1:
            raise self._over_budget(gate, gate.cost(price, demand.input, 0, demand.answers))
        return min([most, *[bound for bound in (cap, demand.most_output) if bound is not None]])

    def _over_budget(self, gate: BudgetGate, cost: int) -> RequestRejected:
        """Return the 429 of a budget, under the lock: it is used up, or other frontends hold the rest of it."""
        self._quotas.table.note_refused(gate.at, cost)
        if cost <= gate.left_of_whole():
            return self._refused("budget", _budget_elsewhere(gate))
        return self._refused("budget", _over_budget(gate, self._quotas.wall_clock()))

    def release(self) -> None:
        """Give back the tokens that were reserved for a model which does not serve the request after all."""
        reserved, self._reserved = self._reserved, None
        if reserved is None:
            return
        now = self._quotas.clock()
        with self._quotas.table.locked():
            for rate in self._gates.tokens:
                rate.settle(rate.units(reserved.input, reserved.output), 0, now)
            for index, budget in enumerate(self._gates.budgets):
                budget.hold(-reserved.costs[index])

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, use: TokenUse, seconds: float = 0.0) -> None:
        """End the charge: the place is free, what was reserved and not used is given back, what was used is spent."""
        generation, self._generation = self._generation, None
        if generation is None:
            return
        try:
            if self._taken or self._reserved is not None:
                self._settle(use)
        finally:
            self._quotas.book.end_charge(generation)
        self._quotas.on_closed(self, use, seconds)

    def _settle(self, use: TokenUse) -> None:
        quotas, gates, table, reserved = self._quotas, self._gates, self._quotas.table, self._reserved
        given: list[tuple[str, int, int]] = []
        lock = table.lock()
        try:
            if self._taken:
                for place in gates.places:
                    place.hold(-1)
            if reserved is not None:
                now = quotas.clock()
                for rate in gates.tokens:
                    rate.settle(rate.units(reserved.input, reserved.output), rate.units(use.input, use.output), now)
                for index, budget in enumerate(gates.budgets):
                    period, cost = (
                        quotas.book.turn(budget),
                        budget.cost(reserved.price, use.input, use.cached, use.output),
                    )
                    budget.spend(reserved.costs[index], cost)
                    given.append((budget.name, period, cost))
        finally:
            table.unlock(lock)
        for each in given:
            quotas.on_spent(*each)

    def rate_headers(self, dialect: Dialect) -> HeaderPairs:
        """Return the headers that show how far the rates are used now, in the shape of an API."""
        return [pair for status in self.statuses() for pair in dialect.rate_headers(status)]

    def statuses(self) -> Sequence[RateStatus]:
        """Return how far the tightest rate of requests and the tightest one of tokens are used."""
        requests, tokens = self._gates.requests, self._gates.tokens
        if not requests and not tokens:
            return ()
        now, wall = self._quotas.clock(), self._quotas.wall_clock()
        found = []
        for kind, gates in (("requests", requests), ("tokens", tokens)):
            tightest: RateStatus | None = None
            for gate in gates:
                remaining, reset = gate.room(now)
                if tightest is None or remaining < tightest.remaining:
                    tightest = RateStatus(kind, int(gate.whole.limit), remaining, reset, wall + reset)
            if tightest is not None:
                found.append(tightest)
        return found


def _estimate(demand: TokenDemand) -> int:
    return OUTPUT_ESTIMATE if demand.most_output is None else min(OUTPUT_ESTIMATE, demand.most_output)


def _over_rate(gate: RateGate, wait: float) -> RequestRejected:
    return RequestRejected(
        429,
        f"Rate limit reached: {gate.name} of {gate.scope} is {int(gate.whole.limit)}, {int(gate.whole.burst)} at once. "
        f"Try again in {_span(wait)}",
        code="rate_limit_exceeded",
        retry_after_seconds=_retry_seconds(wait),
        more_headers=_retry_headers(wait),
    )


def _too_many_at_once(gate: PlaceGate) -> RequestRejected:
    return RequestRejected(
        429,
        f"Too many requests at once: {gate.scope} may have {gate.limit}. Try again when one has ended",
        code="concurrency_limit_exceeded",
        retry_after_seconds=1,
        more_headers=_retry_headers(1.0),
    )


def _over_budget(gate: BudgetGate, now: float) -> RequestRejected:
    end = period_end(gate.budget.period, now)
    when = "not renewed" if end is None else f"renewed in {_span(end - now)}"
    return RequestRejected(
        429,
        f"The budget of {gate.scope} is used up, or its rest is too small for this request. It is {when}",
        code="insufficient_quota",
        stream_type="insufficient_quota",
        more_headers={"x-should-retry": "false"},
    )


def _budget_elsewhere(gate: BudgetGate) -> RequestRejected:
    return RequestRejected(
        429,
        f"Other frontends hold what is left of the budget of {gate.scope}, and give it back. Try again in 1 s",
        code="rate_limit_exceeded",
        retry_after_seconds=1,
        more_headers=_retry_headers(1.0),
    )


def _retry_seconds(wait: float) -> int:
    return min(max(1, math.ceil(wait)), RETRY_LIMIT_SECONDS)


def _retry_headers(wait: float) -> Mapping[str, str]:
    return {"retry-after-ms": str(min(max(1, math.ceil(wait * 1000)), RETRY_LIMIT_SECONDS * 1000))}


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0.001):.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""What happens in one run: drawn from the seed before anything starts, and small enough to print."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynamo.chaos.plan import ALL_KINDS, Fault, FaultKind

__all__ = ["ALL_KINDS", "Fault", "FaultKind", "RequestPlan", "Scenario", "draw"]


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One client's request."""

    number: int
    at_seconds: float
    frontend: int
    is_chat: bool
    is_streaming: bool
    choices: int
    max_tokens: int
    tokens_per_chunk: int
    token_seconds: float
    seed: int
    stop_at: int | None  # stop at the text that begins at this token
    wants_usage: bool
    can_push: bool  # the listener offers `dynamo.push`
    body_parts: int
    priority: int = 0  # what the client sends in `nvext`


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. A limit that is None is none."""

    seed: int
    frontends: int
    workers: int
    router_mode: str
    engine_slots: int | None
    shuffle: bool
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    model_places: int | None = None  # requests that a frontend takes at once
    queue_age_seconds: float | None = None  # above it a frontend takes no more


_ITEM_FAULTS: Final = frozenset({FaultKind.DUPLICATE, FaultKind.CUT, FaultKind.REORDER})
_LONG_SECONDS: Final = (0.5, 4.0, 30.0)  # shorter than every limit; longer than some; longer than all of them
CROWDED_PART: Final = 0.25
_MODES: Final = ("round-robin", "random", "least-loaded", "power-of-two")


def draw(
    seed: int,
    kinds: Collection[FaultKind] = ALL_KINDS,
    *,
    faults: Sequence[Fault] | None = None,
    crowds: bool = True,
) -> Scenario:
    """Return the scenario of a seed, the same in every process and for every hash seed. `faults` replace the seed's own.
    `crowds`: some frontends take few requests; without, a seed is what it was in the first version of this simulation."""
    rng = random.Random(f"scenario {seed}")
    frontends = rng.choice((1, 1, 2))
    requests = tuple(_request(rng, number, frontends) for number in range(rng.randint(2, 8)))
    allowed = sorted(kinds)
    drawn = tuple(_fault(rng, rng.choice(allowed), requests) for _ in range(rng.randint(0, 4))) if allowed else ()
    scenario = Scenario(
        seed=seed,
        frontends=frontends,
        workers=rng.randint(1, 3),
        router_mode=rng.choice(_MODES),
        engine_slots=rng.choice((None, None, 2)),
        shuffle=False,
        requests=requests,
        faults=drawn if faults is None else tuple(faults),
    )
    return _crowded(scenario) if crowds else scenario


def _crowded(scenario: Scenario) -> Scenario:
    """Give some frontends few admission slots and priorities. Uses its own generator: the rest of a seed stays."""
    rng = random.Random(f"crowd {scenario.seed}")
    if rng.random() > CROWDED_PART:
        return scenario
    return replace(
        scenario,
        requests=tuple(replace(plan, priority=rng.choice((-1, 0, 0, 1))) for plan in scenario.requests),
        model_places=rng.choice((None, 1, 3, 5, 10)),
        queue_age_seconds=rng.choice((None, 0.2, 2.0)),
    )


def _request(rng: random.Random, number: int, frontends: int) -> RequestPlan:
    is_long = rng.random() < 0.06  # longer than the credits of a stream
    is_chat = rng.random() < 0.5
    max_tokens = 1500 if is_long else rng.choice((1, 2, 5, 12, 30))
    choices = 1 if is_long else rng.choice((1, 1, 1, 2, 3))
    return RequestPlan(
        number=number,
        at_seconds=rng.choice((0.0, 0.0, rng.uniform(0, 3))),
        frontend=rng.randrange(frontends),
        is_chat=is_chat,
        is_streaming=is_long or rng.random() < 0.7,
        choices=choices,
        max_tokens=max_tokens,
        tokens_per_chunk=16 if is_long else rng.choice((1, 1, 1, 3)),
        token_seconds=rng.choice((0.0, 0.01, 0.05, 0.3, 1.0)) if not is_long else 0.001,
        seed=rng.randrange(1, 1000),
        stop_at=rng.randrange(max_tokens) if not is_chat and not is_long and rng.random() < 0.2 else None,
        wants_usage=rng.random() < 0.5,
        can_push=rng.random() < 0.6,
        body_parts=rng.choice((1, 1, 3)),
    )


def _fault(rng: random.Random, kind: FaultKind, requests: Sequence[RequestPlan]) -> Fault:
    # Faults go where something happens: a point is drawn among the items the request really has.
    request = rng.choice(requests)
    items = max(1, request.max_tokens // request.tokens_per_chunk)
    point = rng.choice((0, 1, rng.randint(0, items), rng.randint(1, items)))
    seconds = 0.0
    match kind:
        case FaultKind.DELAY:
            seconds = rng.choice((0.05, 0.5, 4.0))
        case FaultKind.PARTITION | FaultKind.FREEZE | FaultKind.STORE_CUT | FaultKind.STORE_STOP | FaultKind.STORE_WIPE:
            seconds = rng.choice(_LONG_SECONDS)
        case FaultKind.STALL:
            seconds = rng.choice((1.0, 20.0, 500.0))  # the last is longer than a frontend waits
        case FaultKind.CRASH | FaultKind.FRONTEND_CRASH | FaultKind.DRAIN | FaultKind.FRONTEND_DRAIN:
            seconds = rng.choice((0.0, 1.0, 15.0))  # until the replacement starts
        case FaultKind.CLOCK_JUMP:
            seconds = rng.choice((0.5, 6.0, 60.0))
        case FaultKind.SLOW_CLIENT:
            seconds = rng.choice((0.05, 0.5))
    if kind in _ITEM_FAULTS:
        point = max(1, point)
    return Fault(kind, request.number, point, seconds, rng.choice(("up", "down", "both")), rng.random() < 0.7)

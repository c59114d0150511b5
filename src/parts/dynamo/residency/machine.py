"""The decision which models are in memory, under a budget. It has no clock, no process and no request: the caller has them.

The caller reports what happens (`arrive`, `leave`, `loaded`, `failed`, ...) and does what `decide` orders. Memory counts from
the order to load until the process has ended, so a model is loaded only after what had to make room for it is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

PATIENCE_SECONDS: Final = 5.0
"""How long others wait for a model that is used without a pause. Then it takes no new requests: those that it has come to
their end, and the others have their turn. Shorter, and two busy models would load all the time."""
FIRST_BACKOFF_SECONDS: Final = 1.0
LONGEST_BACKOFF_SECONDS: Final = 60.0
ESTIMATE_MARGIN: Final = 1.25
ESTIMATE_BYTES: Final = 1 << 30
"""So much more than its estimate has to be free for the first load of a model, or all there is. A load for which there is no
room in the end is for nothing."""
HEALTHY_SECONDS: Final = 60.0  # a model that served so long before it died has not failed in a row


class Residence(enum.Enum):
    """Where one model is."""

    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"
    CLOSING = "closing"  # it takes no new requests, and those that it has come to their end
    UNLOADING = "unloading"


class Action(enum.Enum):
    """What is to be done about a model."""

    LOAD = "load"
    UNLOAD = "unload"


class UnloadReason(enum.StrEnum):
    """Why a model is to be unloaded."""

    IDLE = "idle"  # it had no request for long enough
    ROOM = "room"  # others need its memory
    OUTGROWN = "outgrown"  # it takes more than its estimate while it is loaded, and there is no room for that


class Verdict(enum.Enum):
    """What becomes of a request that has arrived."""

    RUNS = "runs"
    WAITS = "waits"
    REFUSED = "refused"  # its model has failed a moment ago, or never fits (`Resident.failure`)


@dataclass(frozen=True, slots=True)
class Order:
    """One thing to be done."""

    action: Action
    name: str
    reason: UnloadReason | None = None  # of an unload


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a model cannot be had, and when it is tried again."""

    reason: str
    in_a_row: int
    retry_at: float


class RoomNeed(NamedTuple):
    """How much memory is missing, and whether a busy model is to make room for it."""

    bytes: int
    is_urgent: bool


class Known(enum.Enum):
    """How well it is known what a model takes."""

    ESTIMATED = "estimated"  # by its weights: caches come on top, and libraries
    UNDERESTIMATED = "underestimated"  # it took more while it was loaded, and how much more is not known
    MEASURED = "measured"  # while it was loaded before


@dataclass(slots=True)
class Memory:
    """The memory of one model, in bytes."""

    needed: int
    known: Known = Known.ESTIMATED
    taken: int = 0  # by now


class Resident:
    """One model, and the requests for it."""

    __slots__ = ("failure", "is_pinned", "memory", "name", "running", "since", "state", "used_at", "waiting")

    def __init__(self, name: str, memory: Memory, *, is_pinned: bool = False) -> None:
        self.name, self.is_pinned, self.memory = name, is_pinned, memory
        self.state = Residence.ABSENT
        self.since = 0.0  # when that state began; of one that is not loaded, when the first waiting request arrived
        self.running = self.waiting = 0  # requests
        self.used_at = 0.0
        self.failure: LoadFailure | None = None

    @property
    def may_be_unloaded(self) -> bool:
        """Whether nothing would be cut or broken by it now."""
        return self.state in (Residence.LOADED, Residence.CLOSING) and not self.is_pinned and not self.running


class Residency:
    """The models of one server. Times are of any one clock, in seconds, and never fall."""

    def __init__(
        self, models: Sequence[Resident], *, budget_bytes: int | None = None, idle_seconds: float | None = None
    ) -> None:
        """None: no limit. `idle_seconds`: how long a model stays without any request."""
        self.models = {model.name: model for model in models}
        self.budget_bytes, self.idle_seconds = budget_bytes, idle_seconds

    @property
    def used_bytes(self) -> int:
        """What the models take that are loaded, or on their way out, and what is kept for those that are being loaded."""
        return sum(map(self._claim, self.models.values()))

    def _claim(self, model: Resident) -> int:
        if model.state is Residence.LOADING:
            return max(self._room_for(model), model.memory.taken)
        return model.memory.taken

    # -- what happens --------------------------------------------------------------------------------------------------

    def arrive(self, name: str, now: float) -> Verdict:
        """Take a request for a model."""
        model = self.models[name]
        model.used_at = now
        if model.state is Residence.LOADED:
            model.running += 1
            return Verdict.RUNS
        if model.state is Residence.ABSENT and self._is_refused(model, now):
            return Verdict.REFUSED
        if not model.waiting and model.state is Residence.ABSENT:
            model.since = now
        model.waiting += 1
        return Verdict.WAITS

    def leave(self, name: str, now: float, *, was_running: bool) -> None:
        """Take the end of a request: of one that was running, or of one that no longer waits."""
        model = self.models[name]
        if was_running:
            model.running -= 1
            model.used_at = now
        else:
            model.waiting -= 1

    def loaded(self, name: str, taken_bytes: int, now: float) -> None:
        """Record a model as serving, and what it takes. The requests that wait for it are running from now on."""
        model = self.models[name]
        model.memory = Memory(taken_bytes, Known.MEASURED, taken_bytes)
        self._open(model, now)

    def found(self, name: str, state: Residence, now: float) -> None:
        """Take a model that was loaded, or was on its way, before this began. A loaded one counts as loading until `loaded`."""
        model = self.models[name]
        model.state, model.since = Residence.LOADING if state is Residence.LOADED else state, now
        model.memory.taken = 0 if state in (Residence.ABSENT, Residence.LOADING) else model.memory.needed

    def measured(self, name: str, taken_bytes: int) -> None:
        """Take what a model takes by now."""
        model = self.models[name]
        if model.state is Residence.LOADING:
            model.memory.taken = taken_bytes
        elif model.state in (Residence.LOADED, Residence.CLOSING):
            model.memory = Memory(taken_bytes, Known.MEASURED, taken_bytes)

    def failed(self, name: str, reason: str, now: float) -> None:
        """Record the failure of a load, or the death of a process. Those that wait for it are to be answered."""
        model = self.models[name]
        was_well = model.state in (Residence.LOADED, Residence.CLOSING) and now - model.since >= HEALTHY_SECONDS
        was_loaded = model.state in (Residence.LOADED, Residence.CLOSING)
        before = 0 if model.failure is None or was_well else model.failure.in_a_row
        # The first death of one that served is followed by a load at once: its requests are waiting for that.
        steps = before - 1 if was_loaded else before
        delay = 0.0 if steps < 0 else min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(steps, 16))
        model.failure = LoadFailure(reason, before + 1, now + delay)
        self._leave_memory(model, now)

    def gone(self, name: str, now: float) -> None:
        """Record the end of the process of a model that was unloaded."""
        model = self.models[name]
        self._leave_memory(model, now)
        model.failure = None

    # -- what is to be done --------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Order]:
        """Return what is to be done now. Each order counts as given: it is not repeated."""
        orders = [*self._unload_idle(now), *self._end_outgrown(now)]
        need = self._load_wanted(now, orders)
        if self.budget_bytes is not None and (over := self.used_bytes - self.budget_bytes) > 0:
            need = RoomNeed(over if need is None else max(need.bytes, over), is_urgent=True)
        if need is None:
            for model in self.models.values():
                if model.state is Residence.CLOSING:  # those that it was to make room for have left
                    self._open(model, now)
        else:
            self._make_room(need, now, orders)
        return orders

    def next_look(self, now: float) -> float | None:
        """Return after how many seconds `decide` may have something to do although nothing happens; None: never."""
        times = [now + PATIENCE_SECONDS] if any(self._wants(model) for model in self.models.values()) else []
        for model in self.models.values():
            if self.idle_seconds is not None and model.may_be_unloaded:
                times.append(model.used_at + self.idle_seconds)
            if model.failure is not None and model.state is Residence.ABSENT and self._wants(model):
                times.append(model.failure.retry_at)
        return max(0.0, min(times) - now) if times else None

    def never_fits(self, model: Resident) -> bool:
        """Return whether it is larger than what the other pinned models leave of the budget."""
        return self.budget_bytes is not None and model.memory.needed > self._room_beside_pinned(model)

    def _room_for(self, model: Resident) -> int:
        """Return how much memory has to be free for a load."""
        memory = model.memory
        if self.budget_bytes is None or memory.known is Known.MEASURED:
            return memory.needed
        most = self._room_beside_pinned(model)
        if memory.known is Known.ESTIMATED:
            most = min(most, round(memory.needed * ESTIMATE_MARGIN) + ESTIMATE_BYTES)
        return max(memory.needed, most)

    def _room_beside_pinned(self, model: Resident) -> int:
        pinned = sum(each.memory.needed for each in self.models.values() if each.is_pinned and each is not model)
        return (self.budget_bytes or 0) - pinned

    def _unload_idle(self, now: float) -> list[Order]:
        if self.idle_seconds is None:
            return []
        idle = [
            model
            for model in self.models.values()
            if model.may_be_unloaded and not model.waiting and now - model.used_at >= self.idle_seconds
        ]
        return [self._unload(model, now, UnloadReason.IDLE) for model in idle]

    def _end_outgrown(self, now: float) -> list[Order]:
        """End the load of a model for which there was room by its estimate, and is none by what it takes.

        The next load has all the room that there can ever be for it.
        """
        if self.budget_bytes is None or self.used_bytes <= self.budget_bytes:
            return []
        found = [
            model
            for model in self.models.values()
            if model.state is Residence.LOADING and model.memory.taken > self._room_for(model)
        ]
        for model in found:
            model.memory.needed, model.memory.known = model.memory.taken, Known.UNDERESTIMATED
        return [self._unload(model, now, UnloadReason.OUTGROWN) for model in found]

    def _load_wanted(self, now: float, orders: list[Order]) -> RoomNeed | None:
        """Order to load what fits, in the order of arrival; return the need of the first that does not fit."""
        wanted = [model for model in self.models.values() if self._wants(model) and not self._is_refused(model, now)]
        for model in sorted(wanted, key=lambda each: (not each.is_pinned, each.since)):
            if self.budget_bytes is not None:
                lacks = self.used_bytes + self._room_for(model) - self.budget_bytes
                if lacks > 0:  # none that came later overtakes it: it would take the room that is being made
                    return RoomNeed(lacks, is_urgent=now - model.since >= PATIENCE_SECONDS)
                if any(each.state is Residence.LOADING for each in self.models.values()):
                    return None  # what that one takes is an estimate, and two of them could be wrong together
            model.state, model.since = Residence.LOADING, now
            orders.append(Order(Action.LOAD, model.name))
        return None

    def _make_room(self, need: RoomNeed, now: float, orders: list[Order]) -> None:
        """Unload the models that were not used for longest until there is room; busy ones where it is urgent."""
        residents = sorted(self.models.values(), key=lambda model: model.used_at)
        orders += [
            self._unload(model, now, UnloadReason.ROOM)
            for model in residents
            if model.state is Residence.CLOSING and not model.running
        ]
        short = need.bytes - sum(
            model.memory.taken for model in residents if model.state in (Residence.CLOSING, Residence.UNLOADING)
        )
        for model in residents:
            if short > 0 and model.may_be_unloaded:
                orders.append(self._unload(model, now, UnloadReason.ROOM))
                short -= model.memory.taken
        for model in residents:
            if short > 0 and need.is_urgent and model.state is Residence.LOADED and not model.is_pinned:
                model.state, model.since = Residence.CLOSING, now
                short -= model.memory.taken

    def _wants(self, model: Resident) -> bool:
        return model.state is Residence.ABSENT and (model.is_pinned or model.waiting > 0 or model.running > 0)

    def _is_refused(self, model: Resident, now: float) -> bool:
        return self.never_fits(model) or (model.failure is not None and now < model.failure.retry_at)

    def _open(self, model: Resident, now: float) -> None:
        model.state, model.since, model.used_at = Residence.LOADED, now, now
        model.running, model.waiting = model.running + model.waiting, 0

    def _unload(self, model: Resident, now: float, reason: UnloadReason) -> Order:
        model.state, model.since = Residence.UNLOADING, now
        return Order(Action.UNLOAD, model.name, reason)

    def _leave_memory(self, model: Resident, now: float) -> None:
        model.state, model.since, model.memory.taken = Residence.ABSENT, now, 0

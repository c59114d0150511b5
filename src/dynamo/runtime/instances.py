"""Which instances of an endpoint there are, which may be used, and which is next. No I/O: time and chance are arguments."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, StrEnum, nonmember
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynamo.errors import InvalidArgument, WorkerUnavailable
from dynamo.runtime.quarantine import Quarantine
from dynamo.runtime.request_plane.base import Instance

DEFAULT_CUDA_TO_CPU_RATIO: Final = 8.0  # DYN_ENCODER_CUDA_TO_CPU_RATIO
DEFAULT_INHIBIT_SECONDS: Final = 5.0  # DYN_RUNTIME_INHIBITED_DURATION_SECS
CPU: Final = "cpu"


class RouterMode(StrEnum):
    """How a client chooses; the values are those of `--router-mode`."""

    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    POWER_OF_TWO = "power-of-two"
    LEAST_LOADED = "least-loaded"
    DEVICE_AWARE_WEIGHTED = "device-aware-weighted"
    DIRECT = "direct"
    # The native system's spelling of the same modes. A type checker would count an alias as a further member.
    if TYPE_CHECKING:
        RoundRobin: RouterMode
        Random: RouterMode
        PowerOfTwoChoices: RouterMode
        LeastLoaded: RouterMode
        DeviceAwareWeighted: RouterMode
        Direct: RouterMode
        KV: str
    else:
        RoundRobin = ROUND_ROBIN
        Random = RANDOM
        PowerOfTwoChoices = POWER_OF_TWO
        LeastLoaded = LEAST_LOADED
        DeviceAwareWeighted = DEVICE_AWARE_WEIGHTED
        Direct = DIRECT
        KV = nonmember("kv")  # comparable, but not a mode of this version: `of` rejects it

    @classmethod
    def of(cls, value: Any) -> RouterMode:
        """A mode, its value in any spelling ("round_robin", "RoundRobin"), or another enum's member of that name.

        Raises InvalidArgument naming the modes there are.
        """
        if isinstance(value, cls):
            return value
        name = value.name if isinstance(value, Enum) else value
        plain = "".join(c for c in str(name).lower() if c.isalnum()).removesuffix("choices")
        for mode in cls:
            if mode.value.replace("-", "") == plain:
                return mode
        if plain == "kv":
            raise InvalidArgument("router mode kv is not built in this version; use round-robin or least-loaded")
        raise InvalidArgument(f"unknown router mode {name!r}; use one of {', '.join(mode.value for mode in cls)}")


class Turn:
    """Who was last, where everybody gets the next request in turn. Who shares an endpoint has a turn for itself."""

    __slots__ = ("last_id",)

    def __init__(self) -> None:
        self.last_id = -1


class InstanceSet:
    """The instances of one endpoint: discovered, and of those the ones that are not in quarantine after an error."""

    def __init__(
        self,
        endpoint: str,
        *,
        rng: random.Random,
        inhibit_seconds: float = DEFAULT_INHIBIT_SECONDS,
        cuda_to_cpu_ratio: float = DEFAULT_CUDA_TO_CPU_RATIO,
    ) -> None:
        """`endpoint` is "ns/comp/ep", for error texts; `inhibit_seconds` 0 switches the quarantine off."""
        self._endpoint = endpoint
        self._rng = rng
        self._ratio = cuda_to_cpu_ratio
        self._by_id: dict[int, Instance] = {}
        self._sorted: list[Instance] = []
        self.quarantine = Quarantine(inhibit_seconds)
        self._inflight: dict[int, int] = {}  # id -> streams open; absent: none
        self._turn = Turn()  # of callers without one of their own

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def discovered(self) -> Sequence[Instance]:
        """Everything the store lists, by id."""
        return self._sorted

    def add(self, instance: Instance) -> None:
        """An instance appeared or changed; if it was in quarantine, that is forgiven."""
        self._by_id[instance.instance_id] = instance
        self.quarantine.forgive(instance.instance_id)
        self._sort()

    def remove(self, instance_id: int) -> None:
        """An instance vanished; absent is fine. Its open streams stay booked until they are released."""
        self.quarantine.forgive(instance_id)
        if self._by_id.pop(instance_id, None) is not None:
            self._sort()

    def get(self, instance_id: int) -> Instance | None:
        return self._by_id.get(instance_id)

    def inhibit(self, instance_id: int, now: float) -> bool:
        """A request to it was lost: leave it out for a while, or until it appears again. Whether that is news."""
        return instance_id in self._by_id and self.quarantine.failed(instance_id, now)

    def routable(self, now: float, exclude: Collection[int] = ()) -> Sequence[Instance]:
        """What may be chosen, by id: who is well, and whose time has come for a probe."""
        out = self.quarantine.shut_out(now) if self.quarantine else ()
        if not out and not exclude:
            return self._sorted
        return [i for i in self._sorted if i.instance_id not in out and i.instance_id not in exclude]

    # -- load ----------------------------------------------------------------------------------------------------

    def book(self, instance_id: int) -> None:
        """A stream to this instance begins. Book before awaiting, or two requests of one turn see the same load."""
        self._inflight[instance_id] = self._inflight.get(instance_id, 0) + 1

    def release(self, instance_id: int) -> None:
        """The counterpart of `book`."""
        left = self._inflight.get(instance_id, 0) - 1
        if left > 0:
            self._inflight[instance_id] = left
        else:
            self._inflight.pop(instance_id, None)

    def inflight(self, instance_id: int) -> int:
        return self._inflight.get(instance_id, 0)

    # -- choosing ------------------------------------------------------------------------------------------------

    def pick(
        self,
        mode: RouterMode,
        now: float,
        exclude: Collection[int] = (),
        *,
        only_well: bool = False,
        turn: Turn | None = None,
    ) -> Instance:
        """The next instance. Raises `WorkerUnavailable` when there is none.

        Where everybody is in quarantine, one of them is asked all the same: a network that was away for a moment must not
        cost more than that moment. `only_well`: not so, the caller has another way.
        """
        found = self.routable(now, exclude)
        if not found and not only_well:
            found = [i for i in self._sorted if i.instance_id not in exclude]
        if not found:
            raise WorkerUnavailable(f"No workers available for endpoint {self._endpoint}")
        match mode:
            case RouterMode.ROUND_ROBIN:
                turn = turn or self._turn
                chosen = self._after(found, turn.last_id)
                turn.last_id = chosen.instance_id
                return chosen
            case RouterMode.RANDOM:
                return self._rng.choice(found)
            case RouterMode.POWER_OF_TWO:
                return self._least(found if len(found) <= 2 else self._rng.sample(found, 2))
            case RouterMode.LEAST_LOADED:
                return self._least(found)
            case RouterMode.DEVICE_AWARE_WEIGHTED:
                return self._least(self._lightest_group(found))
            case RouterMode.DIRECT:
                if len(found) == 1:
                    return found[0]  # the caller excluded all others, or there are none
                raise InvalidArgument("router mode direct: the request must name the instance that shall serve it")

    def named(self, instance_id: int) -> Instance:
        """One instance by id, in quarantine or not. Raises `WorkerUnavailable` naming the id."""
        instance = self._by_id.get(instance_id)
        if instance is None:
            raise WorkerUnavailable(f"instance_id={instance_id} not found for endpoint {self._endpoint}")
        return instance

    def _least(self, found: Sequence[Instance]) -> Instance:
        """The fewest open streams; chance decides between equals, or the lowest id would get every burst."""
        loads = [self.inflight(instance.instance_id) for instance in found]
        lowest = min(loads)
        equals = [instance for instance, load in zip(found, loads, strict=True) if load == lowest]
        return equals[0] if len(equals) == 1 else self._rng.choice(equals)

    def _lightest_group(self, found: Sequence[Instance]) -> Sequence[Instance]:
        """The CPU or the other instances, whichever carries less for its weight; the faster ones when equal."""
        groups = (
            ([i for i in found if i.device_type != CPU], self._ratio),
            ([i for i in found if i.device_type == CPU], 1.0),
        )
        present = [(self._load(group) / (len(group) * weight), group) for group, weight in groups if group]
        return min(present, key=lambda entry: entry[0])[1]

    def _load(self, group: Iterable[Instance]) -> int:
        return sum(self.inflight(instance.instance_id) for instance in group)

    @staticmethod
    def _after(found: Sequence[Instance], instance_id: int) -> Instance:
        """The first one with a higher id, or the first: the turn survives instances that come and go."""
        position = bisect_right(found, instance_id, key=lambda instance: instance.instance_id)
        return found[position % len(found)]

    def _sort(self) -> None:
        # A new list each time: `discovered` may be iterated while the store changes.
        self._sorted = [self._by_id[key] for key in sorted(self._by_id)]


# -- the record -----------------------------------------------------------------------------------------------------------

_decoder = msgspec.json.Decoder(Instance)


def encode_instance(
    namespace: str, component: str, endpoint: str, instance_id: int, transport: Mapping[str, Any]
) -> bytes:
    """The record of `v1/instances`, with its members in the native order; `transport` is the request plane's part."""
    record = {
        "type": "Endpoint",
        "component": component,
        "endpoint": endpoint,
        "namespace": namespace,
        "instance_id": instance_id,
        **transport,
    }
    return msgspec.json.encode(record)


def decode_instance(value: bytes) -> Instance:
    """The record a key holds. Raises `msgspec.MsgspecError` for anything else; unknown members are ignored."""
    return _decoder.decode(value)

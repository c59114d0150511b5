"""Everything that a KV-aware choice is made from, and what comes out of it. Written as JSON, it gives the same choice again.

A `KvState` holds one record per eligible rank. Such a record (`RankState`) does not depend on the prompt and is made anew
only when the rank's load changes; what ranks hold of the prompt stands beside them, for those ranks only that hold any
of it (`RankMatch`). So a choice among many ranks costs little more than its cost function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final, NamedTuple, Protocol

import msgspec

from dynamo.kv.overlap import Overlap, WorkerRank
from dynamo.placement.gaps import NO_GAPS, Gaps
from dynamo.placement.kv_query import KvOverrides, RankExclusion, RequestOrigin, Trust
from dynamo.placement.timing import DEFAULT_TIMING, RankTiming


class KvRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The members of a request that a cost may use."""

    prompt_tokens: int
    complete_blocks: int  # of the prompt
    expected_output: int | None = None  # tokens
    is_pinned: bool = False
    has_preferences: bool = False  # the request names preferred taints or a preferred topology
    tracks_prefill: bool = True
    shared_hits: tuple[tuple[int, int], ...] = ()  # ranges [start, end) of blocks in a shared cache
    overrides: KvOverrides | None = None
    origin: RequestOrigin | None = None


class RankState(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One rank with its load, apart from the prompt. Times are seconds of the caller's clock."""

    rank: WorkerRank
    has_load: bool = True  # the rank is known to the account of loads
    prefill_tokens: int = 0  # prompt tokens of requests without a first token, less the cached ones
    decode_blocks: float = 0.0  # distinct blocks of all active requests
    requests: int = 0  # active requests
    streams: int = 0  # requests that have had their first token
    context_tokens: int = 0  # prompt tokens and known output of all active requests
    pass_started_at: float | None = None  # of the prefill that runs now; None: none runs
    boundary_at: float | None = None  # when a pass was last seen to end; None: not since the rank had no streams
    pass_tokens: int = 0  # uncached tokens of the requests that it computes
    waiting_tokens: int = 0  # uncached tokens of the requests behind it
    waiting_requests: int = 0
    oldest_use_at: float | None = None  # the last use of the block that is evicted next; None: nothing is evicted
    held_blocks: int = 0  # blocks in the rank's cache, as far as the index knows
    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    trust: Trust = Trust.EXACT
    timing: RankTiming = DEFAULT_TIMING
    taints: frozenset[str] = frozenset()


class RankMatch(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one rank has of the prompt, in complete blocks from the first one on."""

    overlap: Overlap = Overlap()
    active_blocks: int = 0  # blocks of requests that are active there
    coming_blocks: int = 0  # blocks that prompts before this one compute there
    preferred_weight: float = 0.0  # sum of the preferred weights that the rank matches


NO_MATCH: Final = RankMatch()


class RecordChanges(NamedTuple):
    """What turns the records before into those of now: positions."""

    gone: Sequence[int] = ()  # in the records before, in order
    new: Sequence[int] = ()  # in order
    changed: Sequence[int] = ()


SAME: Final = RecordChanges()
_SERIALS: Final = count(1)


class Records(tuple[RankState, ...]):
    """The records of all ranks, and where they differ from the records before them; or those of some ranks."""

    serial: int
    former: int  # the serial of the records before
    changes: RecordChanges  # since those
    whole: Records | None = None  # the records of all ranks, of which these are some; None: they are those
    gaps: Gaps = NO_GAPS  # where the others are

    @classmethod
    def after(
        cls,
        former: Records | None,
        states: Sequence[RankState],
        changed: Sequence[int],
        gone: Sequence[int] = (),
        new: Sequence[int] = (),
    ) -> Records:
        """Make the records after `former`, with what differs, as in `RecordChanges`. None: those before are of other ranks."""
        made = cls(states)
        made.serial, made.former = next(_SERIALS), 0 if former is None else former.serial
        made.changes = RecordChanges(gone, new, changed)
        return made

    def without(self, gaps: Gaps) -> Records:
        """Return the records without those of some ranks."""
        made = Records(gaps.left([*self]))
        made.whole, made.gaps = self, gaps
        return made


class SeenRecords:
    """The records that a policy has seen last, so that a thousand need not be compared for each choice."""

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: Sequence[RankState] = ()

    def take(self, ranks: Sequence[RankState]) -> tuple[Sequence[RankState], Gaps, RecordChanges]:
        """Take the records of a state: return those of all ranks, which of them the state is without, and what has changed."""
        records, gaps = (ranks.whole or ranks, ranks.gaps) if isinstance(ranks, Records) else (ranks, NO_GAPS)
        seen, self._records = self._records, records
        if records is seen:
            return records, gaps, SAME
        if isinstance(records, Records) and isinstance(seen, Records) and records.former == seen.serial:
            return records, gaps, records.changes
        return records, gaps, _difference(seen, records)


def _difference(seen: Sequence[RankState], records: Sequence[RankState]) -> RecordChanges:
    """Compare two lists of records. Where both are in order, it names the ranks that have gone, come or changed, and no other."""
    gone, new, changed = list[int](), list[int](), list[int]()
    before = now = 0
    while before < len(seen) and now < len(records):
        former, latter = seen[before], records[now]
        order = 0 if former is latter else (former.rank > latter.rank) - (former.rank < latter.rank)
        if former is not latter:
            (gone, changed, new)[order + 1].append(before if order < 0 else now)
        before += order <= 0
        now += order >= 0
    return RecordChanges([*gone, *range(before, len(seen))], [*new, *range(now, len(records))], changed)


class KvState(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one choice is made from. `matches` goes by position in `ranks`; a rank without an entry has nothing."""

    block_size: int
    request: KvRequest
    ranks: tuple[RankState, ...]
    matches: Mapping[int, RankMatch] = {}
    now: float = 0.0
    excluded: tuple[RankExclusion, ...] = ()

    def to_json(self) -> bytes:
        """Write the state as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> KvState:
        """Read what `to_json` wrote. Raises `msgspec.ValidationError` that names the field."""
        return _DECODER.decode(data)


_DECODER: Final = msgspec.json.Decoder(KvState)


class CostTerm(msgspec.Struct, frozen=True, gc=False):
    """One part of a cost. The terms of one candidate add up to its total."""

    name: str
    value: float


class CandidateCost(msgspec.Struct, frozen=True, gc=False):
    """The cost of one candidate with all its terms."""

    rank: WorkerRank
    total: float
    trust: Trust
    held_blocks: int  # of the prompt, on the device
    terms: tuple[CostTerm, ...] = ()


class KvChoice(msgspec.Struct, frozen=True, gc=False):
    """The rank that was chosen, and why."""

    policy: str
    unit: str  # of costs: "blocks", "ms" or "requests"
    rank: WorkerRank
    position: int  # in `KvState.ranks`
    cost: float
    tied: int = 1  # candidates with this same cost
    draw: float = 0.0  # the chance that was given
    reason: str = "lowest_cost"
    candidates: tuple[CandidateCost, ...] = ()  # in the order of `KvState.ranks`; empty unless requested


class KvPolicy(Protocol):
    """Chooses a rank from a recorded state. `dynamo.placement.policies` has one file for each.

    Where an attribute `reads_timing` of it is False, it reads neither `timing` nor `held_blocks` of records.
    """

    @property
    def name(self) -> str:
        """The name that settings and records know the policy by."""
        ...

    def choose(self, state: KvState, draw: float, *, with_terms: bool = False) -> KvChoice:
        """Choose one of `state.ranks`, of which there is at least one.

        A pure function: `draw` in [0, 1) is the only chance. `with_terms` adds every candidate's cost, term by term; the
        choice is the same either way.
        """
        ...


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """A prompt's blocks and the ranks that hold some of them, as they were at `at`."""

    sequence: Sequence[int]  # chained hashes of the complete blocks
    prompt_tokens: int
    overlaps: Mapping[WorkerRank, Overlap]
    at: float


class Selection(msgspec.Struct, frozen=True, gc=False):
    """The rank for one request, and everything it was chosen from."""

    rank: WorkerRank
    cached_tokens: int
    overlap: Overlap
    trust: Trust
    state: KvState
    choice: KvChoice
    lookup: Lookup
    tracking_sequence: Sequence[int]  # what is booked
    potential_decode_blocks: float  # of the rank with this prompt, the unfinished last block included
    shadow: KvChoice | None = None  # of the policy of `--shadow-policy`, which decides beside the one in force

"""The policy `time`: what a placement costs in milliseconds, to the request and to all others.

The cost of a rank is the sum of these parts. The first three are the request's own time to its first token, and count in
full; the weights of the others are the parameters.

- `wait`: until the pass that runs there now is over. Without a prefill, that is the rest of the step of its streams, counted
  in steps from the last pass that was seen to end; half a step where that is too long ago.
- `seats`: an engine runs so many requests at once (`max_num_seqs`) and no more. Where they are all there, this one waits until
  as many have ended as stand before it, by the mean length of an answer and the time of a step.
- `prefill`: the pass that computes this prompt: what waits there already and joins the same pass, the prompt's own tokens
  that the rank does not hold, and one step of the streams. Blocks that the running pass is bringing in count as held. A pass
  that has been given work and begins only after the step that runs takes this prompt in as well.
- `tail`: the cube of the three. A ms counts for more the later the first token is already, so that a long prompt, which makes
  the longest waits, does not wait as well where a shorter one may. A square would count at 100 ms, too, and cost hits there.
- `stall`: every stream that runs there, and every prompt that waits there, is held up by this prompt's tokens.
- `future`: so are prompts that come while they are computed.
- `decode`: the request's own steps, and how much longer its context makes those of the requests beside it. A rank without
  streams has steps as well, as soon as it has this request. It weighs little, and counts the first steps only, because the
  next placements even the loads out again.
- `eviction`: the rank must give up blocks to hold the new ones. A block is worth what it costs to compute it again, less if
  the rank's oldest blocks were not used for longer than those of other ranks. So a prompt that no rank holds goes where the
  least is lost, and a prefix is not copied to a second rank unless the first one is much slower.
- `room`: what does not fit beside the active requests must wait until some of them end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Annotated, Final, NamedTuple

import msgspec

from dynamo.placement.gaps import Gaps
from dynamo.placement.kv_query import DISK_HIT_WEIGHT, HOST_HIT_WEIGHT, Trust
from dynamo.placement.kv_state import (
    NO_MATCH,
    CandidateCost,
    CostTerm,
    KvChoice,
    KvState,
    RankMatch,
    RankState,
    SeenRecords,
)  # fmt: skip
from dynamo.placement.policies.kv_draw import pick_lowest, pick_sampled
from dynamo.placement.policies.kv_parameters import read_parameters
from dynamo.placement.policies.kv_time_arrays import (
    ARRAYS_FROM,
    TimeArrays,
    TimeConstants,
    TimePrompt,
    lowest_of,
    numpy,
)  # fmt: skip
from dynamo.placement.prefill_pass import DEFAULT_PASS_BUDGET, pass_count
from dynamo.placement.timing import DEFAULT_CAPACITY_TOKENS, MOST_STEPS, pass_ms, rest_of_step_ms

TYPE_NAME: Final = "time"

Weight = Annotated[float, msgspec.Meta(ge=0)]

TRUSTED_SHARE: Final = {Trust.EXACT: 1.0, Trust.DEGRADED: 0.8, Trust.PREDICTED: 0.9, Trust.NONE: 0.0}
"""How much of a reported prefix is counted on. An index that lost events is still right for most blocks; what was only
predicted may have been evicted meanwhile."""

_EXACT: Final = Trust.EXACT

MOST_DECODED: Final = 64.0
"""Tokens of an answer whose steps count in `decode`. Later choices decide which loads stand beside those after them."""

LEAST_IDLE_SECONDS: Final = 1e-3  # of the oldest block; keeps the price of an eviction finite

MOST_IDLE_RATIO: Final = 4.0
"""A block of the rank that has used all of its blocks lately is worth so many times one of the mean rank, at most."""


class TimeParameters(msgspec.Struct, frozen=True, gc=False):
    """How much a millisecond of others counts beside one of the request's own time to first token."""

    stall_weight: Weight = 0.05
    future_weight: Weight = 0.2
    decode_weight: Weight = 1.6
    eviction_weight: Weight = 0.5
    tail_weight: Weight = 0.4  # at a second a ms counts for this much three times more
    host_cache_hit_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = HOST_HIT_WEIGHT
    disk_cache_hit_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = DISK_HIT_WEIGHT
    router_temperature: Weight = 0.0  # 0: the lowest cost; above: sampled by softmax


class _View(NamedTuple):
    """What the cost of one rank is made of that does not depend on the prompt, worked out once for each of its records.

    Floats only, beside the record: a sum of an int and a float takes the interpreter three times as long, and is the same number.
    """

    record: RankState
    # What the arrays hold beyond what the loop reads.
    pass_tokens: float  # that the running pass computes
    waiting_with_pass_ms: float  # `waiting_ms` where those join it
    block_ms: float  # to compute one block
    oldest_use_at: float  # 0: not known
    room_ms: float  # until one more block is free, for each token of output
    known_until: float  # when no more is known of its steps than how long one takes
    idle_own: float  # `idle_wait` with `seat_ms`
    turn: float  # `step`; where that is 0, infinite
    # What the loop over all ranks reads of each, and the arrays as well.
    seat_ms: float  # until the engine admits one more request; 0: at once
    begins_at: float  # of the prefill pass that runs, or that waits for the end of a step; 0: there is none
    ends_at: float  # the same
    boundary_at: float  # when a pass was last seen to end; 0: not known
    base: float
    linear: float
    square: float
    budget: float
    waiting: float  # tokens that join the next pass
    waiting_ms: float  # what they take without this prompt
    step: float  # ms of one step of the streams
    others: float  # weight of a ms that this prompt adds to the pass
    decode: float  # ms for each token of output
    decode_growth: float  # the same, for each token of context that is added
    room: float  # blocks that fit beside the active requests
    free: float  # blocks that can be taken without an eviction
    idle_wait: float  # ms until the step that runs is over; the arrays have it in `idle_own`


_Row = tuple[float, ...]

_row_of: Callable[[_View], _Row] = itemgetter(slice(_View._fields.index("seat_ms"), None))  # what the loop reads
_column_of: Callable[[_View], _Row] = itemgetter(slice(1, -1))  # what the arrays hold


def view_of(rank: RankState, block_size: int, weights: TimeParameters) -> _View:
    timing, total = rank.timing, rank.total_kv_blocks or 0
    requests, streams, prefill = rank.requests, rank.streams, timing.prefill
    capacity = total * block_size or DEFAULT_CAPACITY_TOKENS
    budget = rank.max_num_batched_tokens or DEFAULT_PASS_BUDGET
    fill = min(1.0, rank.context_tokens / capacity)
    # Also where there are no streams: the request's own steps. It makes those of the requests beside it longer, too.
    decode = timing.step_ms(fill, 1 + 2 * requests)
    step = timing.step_ms(fill, streams) if streams else 0.0
    growth = 0.0  # a step over a full cache gets no longer: what is shared is counted in every context
    if fill < 1.0:
        growth = max(0.0, timing.decode.linear + 2 * timing.decode.square * fill) / capacity
    begins_at = ends_at = known_until = 0.0
    boundary_at = rank.boundary_at or 0.0
    waiting_ms = with_pass_ms = pass_ms(prefill, rank.waiting_tokens, budget)
    if rank.pass_started_at is not None:
        begins_at, known_until = rank.pass_started_at, math.inf
        if boundary_at < begins_at:  # it came in the middle of a step
            begins_at += rest_of_step_ms(begins_at, boundary_at, step) / 1000
        elif (boundary_at - begins_at) * 1000 <= step:
            begins_at = boundary_at  # and that step was seen to end
        steps = step * pass_count(rank.pass_tokens, budget)
        ends_at = begins_at + (pass_ms(prefill, rank.pass_tokens, budget) + steps) / 1000
        with_pass_ms = pass_ms(prefill, rank.waiting_tokens + rank.pass_tokens, budget)
    if boundary_at and step and not ends_at:  # a ms longer than it is, as sums of times are not exact
        known_until = boundary_at + (MOST_STEPS * step + 1.0) / 1000
    output_blocks = requests * timing.output_tokens / 2 / block_size
    free = math.inf
    if total and rank.held_blocks:
        free = max(0.0, float(total - rank.held_blocks))
    elif rank.oldest_use_at is not None:
        free = 0.0
    seat_ms = _seat_ms(rank, step or decode)
    return _View(
        rank,
        float(rank.pass_tokens), with_pass_ms, prefill.linear * block_size, rank.oldest_use_at or 0.0,
        decode / total if total else 0.0, known_until, step / 2 + seat_ms, step or math.inf,
        seat_ms, begins_at, ends_at, boundary_at, prefill.base, prefill.linear, prefill.square, float(budget),
        float(rank.waiting_tokens), waiting_ms, step,
        weights.future_weight + weights.stall_weight * (streams + rank.waiting_requests),
        decode, growth * (1 + requests), total - rank.decode_blocks - output_blocks if total else math.inf, free, step / 2,
    )  # fmt: skip


class TimeCost:
    """The policy `time`."""

    __slots__ = (
        "_arrays", "_block_size", "_oldest", "_parameters", "_requests", "_rows", "_seen", "_streams", "_views",
    )  # fmt: skip

    name: Final = "time"

    def __init__(self, parameters: TimeParameters | None = None) -> None:
        self._parameters = parameters or TimeParameters()
        self._block_size = 0  # of the views
        self._seen = SeenRecords()
        self._views: list[_View] = []  # by position; one is used only for the very record that it was made of
        self._rows: list[_Row] = []  # of the views, and so are these, which every decision adds up
        self._requests = self._streams = 0  # of all of them
        self._oldest: list[float] = []
        self._arrays: TimeArrays | None = None  # of the views; None: of none, or they are too few

    @classmethod
    def of(cls, given: Mapping[str, object]) -> TimeCost:
        """Make the policy from named parameters. Raises InvalidArgument for one that does not exist or cannot be."""
        return cls(read_parameters(TYPE_NAME, TimeParameters, given))

    @property
    def parameters(self) -> TimeParameters:
        return self._parameters

    def choose(self, state: KvState, draw: float, *, with_terms: bool = False) -> KvChoice:
        """Choose the rank where the request costs least, or sample one."""
        views, gaps = self._current_views(state)
        request, temperature = state.request, self._parameters.router_temperature
        if request.overrides is not None and request.overrides.router_temperature is not None:
            temperature = request.overrides.router_temperature
        arrays = None
        if len(state.ranks) >= ARRAYS_FROM and not (temperature or with_terms or request.has_preferences):
            arrays = self._current_arrays(views)
        prompt = self._prompt(state, gaps, arrays)
        if arrays is not None:
            found = arrays.costs(state.now, prompt, self._held(state, prompt, views, gaps))
            if gaps.at:
                found = arrays.np.delete(found, gaps.at)
            position, cost, tied = lowest_of(found, draw)
            return KvChoice(self.name, "ms", state.ranks[position].rank, position, cost, tied, draw)
        views, rows = (gaps.left(views), gaps.left(self._rows)) if gaps.at else (views, self._rows)
        costs = self._costs(state, prompt, views, rows)
        if temperature > 0.0:
            position, tied = pick_sampled(costs, temperature, draw)
            reason = "sampled"
        else:
            position, tied = pick_lowest(costs, draw)
            reason = "lowest_cost"
        rank, described = state.ranks[position].rank, self._described(state, prompt, views, costs) if with_terms else ()
        return KvChoice(self.name, "ms", rank, position, costs[position], tied, draw, reason, described)

    # -- what ranks and the decision bring

    def _current_views(self, state: KvState) -> tuple[list[_View], Gaps]:
        """Return a view of every rank, and which of them the state is without; a record that is the same keeps its view."""
        records, gaps, (gone, new, changed) = self._seen.take(state.ranks)
        if self._block_size != state.block_size:
            self._block_size, gone, new, changed = state.block_size, range(len(self._views)), range(len(records)), ()
        if self._arrays is not None and (gone or new):
            self._renew(self._arrays)
            self._arrays.reorder(gone, new)
        for at in reversed(gone):
            self._count(self._views.pop(at), -1)
            del self._rows[at], self._oldest[at]
        for at in new:
            view = view_of(records[at], state.block_size, self._parameters)
            self._views.insert(at, view)
            self._rows.insert(at, _row_of(view))
            self._oldest.insert(at, view.oldest_use_at)
            self._count(view, 1)
        for at in changed:
            view = view_of(records[at], state.block_size, self._parameters)
            self._count(self._views[at], -1)
            self._views[at], self._rows[at], self._oldest[at] = view, _row_of(view), view.oldest_use_at
            self._count(view, 1)
        if self._arrays is not None:
            self._arrays.stale.update(new, changed)
        return self._views, gaps

    def _count(self, view: _View, sign: int) -> None:
        self._requests += sign * view.record.requests
        self._streams += sign * view.record.streams

    def _current_arrays(self, views: list[_View]) -> TimeArrays | None:
        """Return the figures of all views; None where NumPy is not installed."""
        arrays = self._arrays
        if arrays is None:
            if (np := numpy()) is None:
                return None
            tail = self._parameters.tail_weight / 1e6
            limits = TimeConstants(MOST_STEPS, LEAST_IDLE_SECONDS, MOST_IDLE_RATIO, tail)
            arrays = self._arrays = TimeArrays(np, [_column_of(view) for view in views], limits)
        self._renew(arrays)
        return arrays

    def _renew(self, arrays: TimeArrays) -> None:
        while arrays.stale:
            arrays.change(at := arrays.stale.pop(), _column_of(self._views[at]))

    def _prompt(self, state: KvState, gaps: Gaps, arrays: TimeArrays | None = None) -> TimePrompt:
        request, weights, now, count = state.request, self._parameters, state.now, len(state.ranks)
        requests = self._requests - sum([self._views[at].record.requests for at in gaps.at])
        streams = self._streams - sum([self._views[at].record.streams for at in gaps.at])
        output = state.ranks[0].timing.output_tokens if request.expected_output is None else request.expected_output
        needed = -(-request.prompt_tokens // state.block_size) + output / state.block_size
        credit = None if request.overrides is None else request.overrides.overlap_score_credit
        has_space, mean_idle = arrays is not None and arrays.have_space(needed), 0.0
        if not has_space:
            oldest = gaps.left(self._oldest) if gaps.at else self._oldest
            if known := len(oldest) - oldest.count(0.0):
                mean_idle = max(LEAST_IDLE_SECONDS, (known * now - sum(oldest)) / known)
        return TimePrompt(
            request.prompt_tokens, needed, output, request.prompt_tokens + output / 2, 1.0 if credit is None else credit,
            request.tracks_prefill, has_space, mean_idle,
            weights.decode_weight * min(1.0, MOST_DECODED / max(1.0, output)) / (1 + requests / count) ** 1.5,
            weights.eviction_weight * (1 + weights.future_weight + weights.stall_weight * streams / count),
        )  # fmt: skip

    # -- costs

    def _costs(self, state: KvState, prompt: TimePrompt, views: list[_View], rows: list[_Row]) -> list[float]:
        """Return the cost of each rank, in the order of the state."""
        matches, now, block_size, weights = state.matches, state.now, state.block_size, self._parameters
        tokens, needed, output, added, _, is_computed, _, mean_idle, decode_weight, block_weight = prompt
        decoded = output * decode_weight
        fresh = float(max(1, tokens))  # to be computed where nothing is held
        is_timed, tail = mean_idle > 0.0, weights.tail_weight / 1e6
        costs = []
        # fmt: off
        for at, (seat, begins_at, ends_at, boundary_at, base, linear, square, budget, waiting, waiting_ms, step, others, decode, growth, room,
                 free, wait) in enumerate(rows):
            # fmt: on
            if at not in matches:
                missing = over = needed
                computed = waiting + fresh
            else:
                match = matches[at]
                held = _held_blocks(weights, views[at].record, match, prompt)
                missing, over = needed - held, needed - match.active_blocks
                uncached = tokens - held * block_size
                computed = waiting + (uncached if uncached > 1.0 else 1.0)
            if begins_at > now:
                wait = (begins_at - now) * 1000.0
                computed += views[at].pass_tokens
                waiting_ms = views[at].waiting_with_pass_ms
            elif ends_at != 0.0:
                wait = (ends_at - now) * 1000.0
                if wait < 0.0:
                    wait = 0.0
            elif boundary_at != 0.0 and step != 0.0:
                since = (now - boundary_at) * 1000.0
                if since < MOST_STEPS * step:
                    wait = step - since % step
            own = wait + seat
            cost = decoded * (decode + growth * added)
            if is_computed:
                if computed <= budget:
                    work = base + (linear + square * computed) * computed
                    own += work + step
                else:
                    work = pass_ms(views[at].record.timing.prefill, computed, budget)
                    own += work + step * (computed // budget + 1)
                cost += others * (work - waiting_ms)
            cost += own + tail * own * own * own
            if missing > free:
                view, ratio = views[at], 1.0
                if is_timed and view.oldest_use_at:
                    ratio = _idle_ratio(mean_idle, now - view.oldest_use_at)
                cost += (missing - free) * view.block_ms * block_weight * ratio
            if over > room:
                cost += (over - room) * views[at].room_ms * output
            costs.append(cost)
        if state.request.has_preferences and not state.request.is_pinned:
            return [cost * _preference(matches.get(at, NO_MATCH)) for at, cost in enumerate(costs)]
        return costs

    def _held(
        self, state: KvState, prompt: TimePrompt, views: list[_View], gaps: Gaps
    ) -> dict[int, tuple[float, float, float]]:
        """Return what the arrays take of the ranks that hold some of the prompt."""
        held = {}
        for place, match in state.matches.items():
            at = gaps.origin(place)
            blocks = _held_blocks(self._parameters, views[at].record, match, prompt)
            uncached = max(prompt.tokens - blocks * state.block_size, 1.0)
            held[at] = uncached, prompt.needed - blocks, prompt.needed - match.active_blocks
        return held

    # -- the same, part by part

    def _described(
        self, state: KvState, prompt: TimePrompt, views: list[_View], costs: list[float]
    ) -> tuple[CandidateCost, ...]:
        """Return every candidate with the parts of its cost."""
        described = []
        for at, (view, total) in enumerate(zip(views, costs, strict=True)):
            match = state.matches.get(at, NO_MATCH)
            parts = self._parts(state, prompt, view, match)
            if state.request.has_preferences and not state.request.is_pinned:
                parts["preference"] = total - sum(parts.values())
            terms, rank = tuple(CostTerm(name, value) for name, value in parts.items()), view.record
            described.append(CandidateCost(rank.rank, total, rank.trust, match.overlap.device, terms))
        return tuple(described)

    def _parts(self, state: KvState, prompt: TimePrompt, view: _View, match: RankMatch) -> dict[str, float]:
        """Return the parts of the cost of one rank."""
        weights, rank = self._parameters, view.record
        held, now = _held_blocks(weights, rank, match, prompt), state.now
        prefill = added = 0.0
        if prompt.is_computed:
            computed = view.waiting + max(1.0, prompt.tokens - held * state.block_size)
            if view.begins_at > now:
                computed += rank.pass_tokens
            work = pass_ms(rank.timing.prefill, computed, view.budget)
            steps = 1 if computed <= view.budget else computed // view.budget + 1
            prefill, added = work + view.step * steps, work - _waiting_ms(view, now)
        ratio = 1.0
        if prompt.mean_idle and view.oldest_use_at:
            ratio = _idle_ratio(prompt.mean_idle, now - view.oldest_use_at)
        lost = max(0.0, prompt.needed - held - view.free)
        over = max(0.0, prompt.needed - match.active_blocks - view.room)
        wait = _wait_ms(view, now)
        return {
            "wait": wait,
            "seats": view.seat_ms,
            "prefill": prefill,
            "tail": weights.tail_weight / 1e6 * (wait + view.seat_ms + prefill) ** 3,
            "stall": weights.stall_weight * (rank.streams + rank.waiting_requests) * added,
            "future": weights.future_weight * added,
            "decode": prompt.output * prompt.decode_weight * (view.decode + view.decode_growth * prompt.added),
            "eviction": lost * view.block_ms * prompt.block_weight * ratio,
            "room": over * view.room_ms * prompt.output,
        }


def _held_blocks(weights: TimeParameters, rank: RankState, match: RankMatch, prompt: TimePrompt) -> float:
    """Return the blocks of the prompt that need not be computed."""
    overlap = match.overlap
    held: float = overlap.device
    if overlap.host or overlap.disk:
        held += weights.host_cache_hit_weight * overlap.host + weights.disk_cache_hit_weight * overlap.disk
    held = max(held, match.coming_blocks)
    if rank.trust is _EXACT:
        return prompt.credit * held
    return prompt.credit * TRUSTED_SHARE[rank.trust] * held


def _seat_ms(rank: RankState, step: float) -> float:
    """Return the ms until a rank admits one more request: streams end one after the other, each after a mean answer."""
    seats = rank.max_num_seqs
    if not seats or rank.requests < seats:
        return 0.0
    return (rank.requests - seats + 1) / seats * rank.timing.output_tokens * step


def _wait_ms(view: _View, now: float) -> float:
    """Return the ms until the next pass begins at a rank. `_costs` has the same in line."""
    if view.ends_at:
        return max(0.0, ((view.begins_at if view.begins_at > now else view.ends_at) - now) * 1000.0)
    return rest_of_step_ms(now, view.boundary_at, view.step) or view.idle_wait


def _waiting_ms(view: _View, now: float) -> float:
    """Return what the next pass takes without the prompt that is to be placed."""
    return view.waiting_with_pass_ms if view.begins_at > now else view.waiting_ms


def _idle_ratio(mean_idle: float, idle: float) -> float:
    """Return what a block is worth that was last used `idle` seconds ago, beside one of the mean rank."""
    ratio = mean_idle / max(LEAST_IDLE_SECONDS, idle)
    return min(MOST_IDLE_RATIO, ratio * ratio)


def _preference(match: RankMatch) -> float:
    return math.exp(-math.tanh(match.preferred_weight))

"""A user's policy as a policy of the router (`KvPolicy`): a decision of it, or the default's where it fails.

Whatever a user's policy does costs no request: where it raises, takes too long or returns what cannot be, the policy `time`
decides in its place. Failures are counted and reported; after some in a row it is left alone for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from time import monotonic, thread_time
from typing import Any, Final

import msgspec

from dynamo.errors import Overloaded
from dynamo.placement.kv_state import NO_MATCH, CandidateCost, CostTerm, KvChoice, KvState, RankState
from dynamo.placement.policies.kv_draw import pick_lowest
from dynamo.placement.policies.kv_time import TimeCost
from dynamo.policies.records import (
    MAX_DEFER_SECONDS,
    Classified,
    PolicyCandidate,
    PolicyRequest,
    candidate_of,
    request_of,
)
from dynamo.policies.user_code import TIME_LIMIT_SECONDS, PolicyStalled, call_timed, load_policy

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW: Final = 10
"""After so many the policy is left alone for `REST_SECONDS`; a stall counts as five, as each holds the event loop."""
REST_SECONDS: Final = 10.0
LOG_SECONDS: Final = 10.0  # a failure of the same kind is logged no more often
SLOW_SECONDS: Final = 0.005
"""A decision that takes longer holds up every other request for a while: it counts, and so do those in a row."""
KINDS: Final = ("raised", "stalled", "slow", "invalid", "resting")

_STALL_WEIGHT: Final = 5


class NoWorkerLeft(Overloaded):
    """The `filter` of a policy leaves no worker for a request."""


class InvalidDecision(Exception):
    """What a user's policy returned cannot be used."""


class SlowDecision(Exception):
    """A user's policy decided, and took long."""


class PolicyHealth:
    """The failures of one policy, and whether it is left alone for now."""

    __slots__ = ("_in_a_row", "_logged_at", "_name", "_rests_until", "count", "on_failure")

    def __init__(self, name: str) -> None:
        self._name = name
        self.count: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.on_failure: Callable[[str], None] = lambda _kind: None  # gets each failure, by one of KINDS
        self._in_a_row = 0
        self._rests_until = 0.0
        self._logged_at: dict[str, float] = {}

    def may_decide(self) -> bool:
        """Return whether the policy is to decide now; count the decision that it misses where not."""
        if self._in_a_row < FAILURES_IN_A_ROW:
            return True
        if monotonic() >= self._rests_until:
            self._in_a_row = FAILURES_IN_A_ROW - 1  # one more failure, and it rests again
            return True
        self._count("resting")
        return False

    def succeeded(self, seconds: float = 0.0) -> None:
        """Take a decision that was made in so many seconds."""
        if seconds > SLOW_SECONDS:
            self.failed(
                SlowDecision(f"a decision took {1e3 * seconds:.0f} ms of CPU, more than {1e3 * SLOW_SECONDS:.0f}")
            )
        else:
            self._in_a_row = 0

    def failed(self, error: BaseException) -> None:
        """Take a decision that was not made, and log it where that has not just been done."""
        kind = "raised"
        if isinstance(error, PolicyStalled):
            kind = "stalled"
        elif isinstance(error, InvalidDecision):
            kind = "invalid"
        elif isinstance(error, SlowDecision):
            kind = "slow"
        self._count(kind)
        self._in_a_row += _STALL_WEIGHT if kind == "stalled" else 1
        now = monotonic()
        if now - self._logged_at.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_at[kind] = now
            self._log(kind, error)
        if self._in_a_row >= FAILURES_IN_A_ROW:
            self._rests_until = now + REST_SECONDS
            logger.error(
                "policy %s fails again and again: `time` decides for the next %.0f s", self._name, REST_SECONDS
            )

    def _count(self, kind: str) -> None:
        self.count[kind] += 1
        self.on_failure(kind)

    def _log(self, kind: str, error: BaseException) -> None:
        if kind == "stalled":
            logger.error(
                "policy %s took more than %.0f ms for a decision: `time` decided", self._name, 1e3 * TIME_LIMIT_SECONDS
            )
        elif kind == "slow":
            logger.warning("policy %s: %s", self._name, error)
        elif kind == "invalid":
            logger.error("policy %s: %s: `time` decided", self._name, error)
        else:
            logger.error("policy %s raised an error: `time` decided", self._name, exc_info=error)


class ProgrammedPolicy:
    """A user's policy. Pure as far as the user's methods are."""

    __slots__ = ("_candidates", "_fallback", "_methods", "health", "health_of_classify", "name")

    def __init__(self, name: str, policy: Any) -> None:
        """`policy`: an object with the methods of `WorkerPolicy`, one of them at least."""
        self.name = name
        # One each: the success of one method is no sign for the other.
        self.health, self.health_of_classify = PolicyHealth(name), PolicyHealth(name)
        self._methods = tuple(getattr(policy, each, None) for each in ("filter", "score", "pick", "classify"))
        self._fallback = TimeCost()
        self._candidates: list[PolicyCandidate] = []  # of the last decision, with nothing of a prompt

    @property
    def classifies(self) -> bool:
        """Whether the policy has a method `classify`."""
        return self._methods[3] is not None

    def report_to(self, on_failure: Callable[[str], None]) -> None:
        """Report each failure from now on, by one of `KINDS`."""
        self.health.on_failure = self.health_of_classify.on_failure = on_failure

    def choose(self, state: KvState, draw: float, *, with_terms: bool = False) -> KvChoice:
        """Choose a rank. See `KvPolicy`.

        Raises NoWorkerLeft where `filter` leaves none.
        """
        health = PolicyHealth(self.name) if with_terms else self.health  # with terms it is only an explanation
        if health.may_decide():
            began = thread_time()  # not wall time: a busy machine makes nothing slow
            try:
                made = call_timed(partial(self._decide, state, draw, with_terms))
            except NoWorkerLeft:
                health.succeeded()
                raise
            except (Exception, PolicyStalled) as error:  # the policy is the user's: it may raise anything
                health.failed(error)
            else:
                health.succeeded(thread_time() - began)
                # Not within the time limit: what `time` keeps between decisions must not be left half done.
                return made if isinstance(made, KvChoice) else self._of_fallback(state, made, draw, with_terms)
        # With its terms, so that an explanation does not call the policy again.
        choice = self._fallback.choose(state, draw, with_terms=True)
        return msgspec.structs.replace(choice, policy=f"time (for {self.name})")

    def classify(self, request: PolicyRequest, ranks: Sequence[RankState]) -> Classified | None:
        """Return what the policy changes of a new request; None: nothing, or it has failed."""
        method, health = self._methods[3], self.health_of_classify
        if method is None or not health.may_decide():
            return None
        try:
            found = call_timed(partial(method, request, self._loads(ranks)))
            checked = _checked(found)
        except (Exception, PolicyStalled) as error:
            health.failed(error)
            return None
        health.succeeded()
        return checked

    # -- a decision --------------------------------------------------------------------------------------------------

    def _loads(self, ranks: Sequence[RankState]) -> list[PolicyCandidate]:
        """Return the records of ranks without a prompt; those that have not changed since the last call are the same."""
        known = self._candidates
        if len(known) == len(ranks):
            made = [
                one if one.state is state else candidate_of(state, NO_MATCH, 0, 0)
                for one, state in zip(known, ranks, strict=True)
            ]
        else:
            made = [candidate_of(state, NO_MATCH, 0, 0) for state in ranks]
        self._candidates = made
        return made

    def _decide(self, state: KvState, draw: float, with_terms: bool) -> KvChoice | list[int]:
        """Return the policy's choice, or the positions among which `time` is to choose."""
        tokens, size = state.request.prompt_tokens, state.block_size
        everyone = self._loads(state.ranks)
        if state.matches:
            everyone = everyone.copy()
            for at, match in state.matches.items():
                everyone[at] = candidate_of(state.ranks[at], match, size, tokens)
        request = request_of(state)
        filter_, score, pick, _ = self._methods
        candidates: Sequence[PolicyCandidate] = everyone
        if filter_ is not None and not state.request.is_pinned:
            candidates = _filtered(filter_(request, everyone), everyone)
        suggested = _suggested(state, candidates)
        if suggested:
            candidates = suggested
        scores: list[float] = []
        if score is not None:
            scores = [score(request, each) for each in candidates]
            _check_scores(scores)
        reason = "suggested" if suggested else "lowest_cost"
        if pick is not None:
            chosen, tied = _picked(pick(request, candidates, scores), candidates), 1
            reason = "picked"
        elif score is not None:
            chosen, tied = pick_lowest(scores, draw)
        else:
            positions = {id(each): at for at, each in enumerate(everyone)}
            return [positions[id(each)] for each in candidates]
        position = chosen if candidates is everyone else _position(everyone, candidates[chosen])
        return KvChoice(
            self.name,
            "score",
            state.ranks[position].rank,
            position,
            float(scores[chosen]) if scores else 0.0,
            tied,
            draw,
            reason,
            _costs(candidates, scores, state) if with_terms else (),
        )

    def _of_fallback(self, state: KvState, at: Sequence[int], draw: float, with_terms: bool) -> KvChoice:
        """Return the default's choice among the ranks that a policy without scores leaves, by position."""
        matches = {new: state.matches[old] for new, old in enumerate(at) if old in state.matches}
        part = msgspec.structs.replace(state, ranks=tuple([state.ranks[old] for old in at]), matches=matches)
        choice = self._fallback.choose(part, draw, with_terms=with_terms)
        return msgspec.structs.replace(choice, policy=self.name, position=at[choice.position])


def _filtered(found: object, everyone: Sequence[PolicyCandidate]) -> list[PolicyCandidate]:
    """Return what `filter` returned, as a list. Raises InvalidDecision for anything but candidates."""
    try:
        left: list[PolicyCandidate] = list(found)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidDecision(f"filter returned {_shown(found)}, not a list of candidates") from None
    known = {id(each) for each in everyone}
    for each in left:
        if id(each) not in known:
            raise InvalidDecision(f"filter returned {_shown(each)}, which is none of the candidates")
    if not left:
        raise NoWorkerLeft("the router's policy leaves no worker for this request")
    return left


def _check_scores(scores: Sequence[object]) -> None:
    """Raise InvalidDecision unless all are finite numbers."""
    try:
        if isfinite(sum(scores)):  # type: ignore[arg-type]
            return
        wrong = [each for each in scores if not isfinite(each)]  # type: ignore[arg-type]
    except TypeError:
        wrong = [each for each in scores if not isinstance(each, int | float)]
    if wrong:
        raise InvalidDecision(f"score returned {_shown(wrong[0])}, not a finite number")


def _picked(found: object, candidates: Sequence[PolicyCandidate]) -> int:
    """Return where in the candidates the picked one is. Raises InvalidDecision for anything else."""
    for at, each in enumerate(candidates):
        if each is found:
            return at
    raise InvalidDecision(f"pick returned {_shown(found)}, which is none of the candidates")


def _position(everyone: Sequence[PolicyCandidate], candidate: PolicyCandidate) -> int:
    return next(at for at, each in enumerate(everyone) if each is candidate)


def _suggested(state: KvState, candidates: Sequence[PolicyCandidate]) -> list[PolicyCandidate]:
    """Return the ranks of the worker that `classify` suggested, those that may serve; [] where there is none."""
    origin = state.request.origin
    if origin is None or origin.suggested_worker_id is None:
        return []
    return [each for each in candidates if each.worker_id == origin.suggested_worker_id]


def _costs(candidates: Sequence[PolicyCandidate], scores: Sequence[float], state: KvState) -> tuple[CandidateCost, ...]:
    """Return each candidate with its score."""
    return tuple([
        CandidateCost(
            each.state.rank,
            float(score),
            each.state.trust,
            each.cached_tokens // state.block_size,
            (CostTerm("score", float(score)),),
        )
        for each, score in zip(candidates, scores or [0.0] * len(candidates), strict=True)
    ])  # fmt: skip


def _checked(found: object) -> Classified | None:
    """Return what `classify` returned. Raises InvalidDecision for anything that is not one, or a number that cannot be."""
    if found is None:
        return None
    if not isinstance(found, Classified):
        raise InvalidDecision(f"classify returned {_shown(found)}, not a Classified")
    numbers = [
        found.defer_seconds,
        0.0 if found.priority is None else found.priority,
        1.0 if found.due_ms is None else found.due_ms,
    ]
    is_worker = found.worker_id is None or isinstance(found.worker_id, int)
    if not is_worker or not all(isinstance(each, int | float) and isfinite(each) for each in numbers):
        raise InvalidDecision(f"classify returned {_shown(found)}, a member of which is not a number")
    if found.defer_seconds < 0 or numbers[2] <= 0:
        raise InvalidDecision(f"classify returned {_shown(found)}, with a time that is too short")
    return msgspec.structs.replace(found, defer_seconds=min(found.defer_seconds, MAX_DEFER_SECONDS))


def _shown(value: object) -> str:
    """Return a value in at most 80 characters; its own text may raise or be of any length."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"{type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def programmed_policy(name: str, parameters: Mapping[str, object]) -> ProgrammedPolicy:
    """Return the policy of `FILE.py:NAME`. Raises InvalidArgument with what is wrong in it."""
    return ProgrammedPolicy(name, load_policy(name, parameters))

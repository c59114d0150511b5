"""From one row of logits to one token, and whether the sequence ends with it.

Randomness has no state: the number that picks a token is a function of (seed, choice, absolute position). So a seeded
request gives the same tokens alone, in any batch, and on another worker that continues it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamo.errors import InvalidArgument

Array = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

BANNED: Final = -np.inf
U53: Final = 2**53  # the integers a float can distinguish


@dataclass(frozen=True, slots=True)
class Stop:
    """When a sequence ends. Counts are of generated tokens."""

    max_tokens: int
    min_tokens: int = 0
    eos: frozenset[int] = frozenset()  # excluded from the output
    hidden: frozenset[int] = frozenset()  # the user's; excluded
    visible: frozenset[int] = frozenset()  # the user's; included
    shows_ends: bool = False  # the others are included, too: a trainer needs every token that was drawn

    @property
    def all(self) -> frozenset[int]:
        return self.eos | self.hidden | self.visible


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. The defaults change nothing."""

    seed: int
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()  # (token, what its logit is raised by)
    allowed_tokens: frozenset[int] | None = None  # nothing else is drawn; None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences that must not appear
    logprobs: int | None = None  # alternatives beside the chosen token; None: off
    logprob_tokens: tuple[int, ...] = ()  # reported whatever their rank

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def is_plain(self) -> bool:
        """The most likely token, and nothing else to know or to do."""
        changes = self.penalises or self.bias or self.bad_words or self.allowed_tokens is not None
        return self.temperature == 0 and self.logprobs is None and not changes


@dataclass(slots=True)
class History:
    """The tokens that the penalties cover."""

    prompt: frozenset[int]
    generated: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token, and the requested details about it."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), the most likely first
    asked: tuple[tuple[int, int, float], ...] = ()  # (token, rank from 1, logprob) of `logprob_tokens` not in `top`


def draw(
    logits: Array,
    sampling: Sampling,
    *,
    choice: int,
    position: int,
    history: History,
    banned: Iterable[int] = (),
    allowed: Mask | None = None,
) -> Drawn:
    """Choose the token at `position` (0 is the prompt's first). `logits` is not changed.

    Order: bans, bias, repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p. Log
    probabilities are the model's own, before all of these. Raises InvalidArgument when the bans leave no token.
    """
    row = logits.astype(np.float64)
    if ids := list(banned):
        row[ids] = BANNED
    if allowed is not None:
        row[~allowed] = BANNED
    if sampling.allowed_tokens is not None:
        others = np.ones(len(row), np.bool_)
        others[list(sampling.allowed_tokens)] = False
        row[others] = BANNED
    if row.max() == BANNED:
        raise InvalidArgument(
            f"no token is left for position {position}: what sampling_options and stop_conditions allow excludes each other"
        )
    for token, bias in sampling.bias:
        row[token] += bias
    if sampling.penalises:
        _penalise(row, sampling, history)
    if sampling.temperature == 0:
        token = int(row.argmax())
    else:
        with np.errstate(over="ignore"):  # next to nothing is left of the others, and a temperature may be tiny
            scaled = (row - row.max()) / sampling.temperature
        candidates, weights = _candidates(scaled, sampling)
        point = uniform(sampling.seed, choice, position)
        cumulated = np.cumsum(weights)
        place = int(np.searchsorted(cumulated, point * cumulated[-1], side="right"))
        token = int(candidates[min(place, len(candidates) - 1)])
    if sampling.logprobs is None:
        return Drawn(token)
    own = log_softmax(logits)
    top = top_entries(own, sampling.logprobs)
    shown = {entry for entry, _ in top}
    asked = [
        (other, int(np.count_nonzero(own > own[other])) + 1, float(own[other]))
        for other in sampling.logprob_tokens
        if other not in shown
    ]
    return Drawn(token, float(own[token]), top, tuple(asked))


def bad_word_ends(bad_words: Iterable[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of `bad_words` behind `tokens`."""
    ends = []
    for word in bad_words:
        begun = len(word) - 1
        if begun <= len(tokens) and list(tokens[len(tokens) - begun :]) == list(word[:-1]):
            ends.append(word[-1])
    return ends


def ending(token: int, generated: int, stop: Stop) -> tuple[str | None, bool]:
    """Return (reason, shown): why the sequence ends with its `generated`-th `token`, if so; whether the token is output."""
    if generated > stop.min_tokens:
        if token in stop.eos:
            return "eos", stop.shows_ends
        if token in stop.hidden:
            return "stop", stop.shows_ends
        if token in stop.visible:
            return "stop", True
    return ("length" if generated >= stop.max_tokens else None), True


def uniform(seed: int, choice: int, position: int) -> float:
    """Draw a number in [0, 1), the same everywhere for the same three numbers."""
    text = f"{seed}/{choice}/{position}".encode()
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11) / U53


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    row = logits.astype(np.float64)
    row -= row.max()
    shifted: npt.NDArray[np.float64] = row - np.log(np.exp(row).sum())
    return shifted


def top_entries(logprobs: npt.NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens; equals in the order of their ids."""
    if count == 0:
        return ()
    order = np.argsort(-logprobs, kind="stable")[:count]
    return tuple((int(token), float(logprobs[token])) for token in order)


def _penalise(row: npt.NDArray[np.float64], sampling: Sampling, history: History) -> None:
    if sampling.repetition_penalty != 1.0 and (seen := list(history.prompt | history.generated.keys())):
        old = row[seen]
        row[seen] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if history.generated and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = list(history.generated)
        counts = np.fromiter(history.generated.values(), np.float64, len(ids))
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _candidates(
    row: npt.NDArray[np.float64], sampling: Sampling
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return (token ids, weights) of what may be drawn, in an order that does not depend on rounding: that of the ids."""
    weights = np.exp(row - row.max())
    size = len(row)
    keep = weights >= sampling.min_p  # the largest weight is 1
    if 0 < sampling.top_k < size:
        order = np.argsort(-weights, kind="stable")
        keep[order[sampling.top_k :]] = False
        weights = np.where(keep, weights, 0.0) if sampling.top_p < 1 else weights
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]  # of all that are more likely
        keep[order[before >= sampling.top_p * weights.sum()]] = False
        keep[order[0]] = True
    ids = np.flatnonzero(keep)
    return ids, weights[ids]

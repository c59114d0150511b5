"""What one answer may contain at this point: its grammar, its thoughts, and the budget of those.

Thoughts are what stands between a model's two markers. A grammar does not hold for them, and a budget may end them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dynamo.errors import InvalidArgument
from dynamo.reference.guided import Guide, Mask

BEGIN: Final = "<think>"
END: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens around a model's thoughts."""

    begin: int
    end: int


def find_markers(directory: Path) -> Markers:
    """Find `<think>` and `</think>` in the model's `tokenizer.json`.

    Raises InvalidArgument when the file is missing, or the two are not one token each.
    """
    path = directory / "tokenizer.json"
    try:
        found = json.loads(path.read_bytes())
        vocabulary = found["model"]["vocab"]
        known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        known.update((entry["content"], entry["id"]) for entry in found.get("added_tokens") or ())
    except OSError as error:
        raise InvalidArgument(f"a request that bounds or awaits thoughts needs {path.name} on the worker") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"the model's {path.name} cannot be used: {error!r}") from error
    begin, end = known.get(BEGIN), known.get(END)
    if begin is None or end is None:
        raise InvalidArgument(
            f"stop_conditions.max_thinking_tokens and require_reasoning need a model that has {BEGIN} and {END} as tokens"
        )
    return Markers(int(begin), int(end))


class ThoughtState:
    """Where an answer is: before its thoughts, in them, or behind them."""

    def __init__(self, markers: Markers, prompt: Iterable[int], *, budget: int | None) -> None:
        """A prompt may end inside thoughts. `budget`: tokens of thought; None: as many as the model likes."""
        self.markers, self._budget = markers, budget
        self._tokens = 0
        self.is_open = False
        self.may_begin = True  # nothing was generated yet
        for token in prompt:
            if token in (markers.begin, markers.end):
                self.is_open = token == markers.begin

    @property
    def is_spent(self) -> bool:
        """In them, and they must end now."""
        return self.is_open and self._budget is not None and self._tokens >= self._budget

    def accept(self, token: int) -> None:
        """Go on by one token."""
        self.may_begin = False
        if token == self.markers.end:
            self.is_open = False
        elif self.is_open:
            self._tokens += 1
        elif token == self.markers.begin:
            self.is_open = True


class Steering:
    """Follows one choice: `allowed` before a token is drawn, `accept` after it. Used by one thread at a time."""

    def __init__(self, guide: Guide | None, thinking: ThoughtState | None, *, awaits_thoughts: bool = False) -> None:
        """`awaits_thoughts`: the answer may begin with thoughts, and the grammar holds for what follows them."""
        self._guide, self._thinking, self._awaits = guide, thinking, awaits_thoughts

    @property
    def is_complete(self) -> bool:
        """The grammar allows nothing to follow."""
        return self._guide is not None and self._guide.is_complete

    def allowed(self, ends: Sequence[int], vocab_size: int) -> Mask | None:
        """Return the mask of the tokens that may come next; None: all. `ends` are the ids that end the answer."""
        thinking = self._thinking
        if thinking is not None and thinking.is_spent:
            only = np.zeros(vocab_size, np.bool_)
            only[thinking.markers.end] = True
            return only
        if self._guide is None:
            return None
        if self._is_free:  # the grammar waits: an answer that ended here would have nothing of what it must be
            unended = np.ones(vocab_size, np.bool_)
            unended[[end for end in ends if end < vocab_size]] = False
            return unended
        mask = self._guide.allowed(ends)
        if thinking is not None and self._awaits and thinking.may_begin:
            mask[thinking.markers.begin] = True
        return mask

    def accept(self, token: int) -> None:
        """Go on by one token. Raises InvalidArgument for one that the grammar does not allow."""
        was_free = self._is_free
        if self._thinking is not None:
            begins = self._awaits and self._thinking.may_begin and token == self._thinking.markers.begin
            self._thinking.accept(token)
            was_free = was_free or begins
        if self._guide is not None and not was_free:
            self._guide.accept(token)

    def copy(self) -> Steering:
        guide = None if self._guide is None else self._guide.copy()
        return Steering(guide, copy.copy(self._thinking), awaits_thoughts=self._awaits)

    @property
    def _is_free(self) -> bool:
        """In thoughts that the grammar waits for."""
        return self._awaits and self._thinking is not None and self._thinking.is_open

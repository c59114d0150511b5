"""The short way of nearly every token of a streamed answer: from its id to the bytes of its event. The hottest code there is.

A token comes once every few milliseconds for each stream, and hundreds of streams share the processor's caches. So what counts
is not only how many steps there are, but how many objects they touch: `PlainTokens` holds what all of them need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dynamo.frontend.base.metrics.requests import RequestMetrics
from dynamo.frontend.pipeline.idle_timeout import IdleTimeout
from dynamo.frontend.pipeline.sink import AnswerStream, SplicedEvents
from dynamo.protocol.openai.escaping import json_text
from dynamo.runtime.calls.request_plane.base import StreamItem
from dynamo.text.decoder import ChoiceDecoder
from dynamo.text.pieces import EncodedPieces


class _Counts(Protocol):
    completion_tokens: int


class PlainOutput:
    """Where plain text goes: the events of one answer that have nothing but text."""

    __slots__ = ("_ends", "_stream", "counters", "idle", "refused", "spliced")

    def __init__(
        self,
        ends: tuple[bytes, bytes],
        stream: AnswerStream,
        refused: list[bytes],
        counters: RequestMetrics,
        idle: IdleTimeout | None,
    ) -> None:
        """`ends`: what stands before and behind the text's JSON in an event. `refused` gets the event that could not be
        pushed; the caller has to write it."""
        self._ends, self._stream = ends, stream
        self.refused, self.counters, self.idle = refused, counters, idle
        self.spliced = stream.splicer(*ends)

    def send(self, text: str, count: int, now: float) -> bool:
        """Send the text of `count` tokens; False when it could not be pushed."""
        if self.idle is not None:
            self.idle.last = now
        self.counters.tokens(count, now)
        return not text or self.push(json_text(text), now)

    def push(self, piece: bytes, now: float) -> bool:
        """Send an event; `piece` is its text as JSON. False when it could not be pushed."""
        spliced = self.spliced
        if spliced is not None and spliced.push(piece, now):
            return True
        event = piece.join(self._ends)
        if spliced is None and self._stream.push(event, now):
            return True
        self.refused.append(event)
        return False


class NumberedOutput(PlainOutput):
    """The same for an API whose events differ in more than their text: each is written by the API."""

    __slots__ = ("_write",)

    def __init__(
        self,
        write: Callable[[bytes], bytes],
        stream: AnswerStream,
        refused: list[bytes],
        counters: RequestMetrics,
        idle: IdleTimeout | None,
    ) -> None:
        """`write` returns the event of a text, which is given as JSON."""
        self._write, self._stream = write, stream
        self.refused, self.counters, self.idle = refused, counters, idle
        self.spliced = None

    def push(self, piece: bytes, now: float) -> bool:
        event = self._write(piece)
        if self._stream.push(event, now):
            return True
        self.refused.append(event)
        return False


class PlainTokens:
    """Takes the token ids of one choice while nothing but text can come of them.

    What it has taken stands in `generated` at once. The decoder's count and the tally learn of it in `settle`, which is called
    before either is used, and when the reading ends.
    """

    __slots__ = (
        "_counters", "_decoder", "_generated", "_idle", "_now", "_otherwise", "_output", "_pieces", "_settled",
        "_spliced", "_stop_ids", "_tally",
    )  # fmt: skip

    def __init__(
        self,
        decoder: ChoiceDecoder,
        generated: list[int],
        tally: _Counts,
        output: PlainOutput,
        otherwise: Callable[[list[StreamItem]], bool],
    ) -> None:
        """`generated` gets the ids. `otherwise` takes the items of which something else may come."""
        self._decoder, self._generated, self._tally, self._output = decoder, generated, tally, output
        self._otherwise = otherwise
        self._counters, self._idle, self._spliced = output.counters, output.idle, output.spliced
        self._now = asyncio.get_running_loop().time
        self._stop_ids = decoder.stop_ids
        self._settled = len(generated)  # of `generated`: those that the decoder and the tally have counted
        self._pieces: EncodedPieces | _NoPieces = _NO_PIECES
        self._look_up()

    @staticmethod
    def take_step(lanes: Sequence[PlainTokens], ids: Sequence[int], now: float) -> list[int]:
        """Take an id for each lane where its text is known and can be pushed; return the places of the others.

        It does what `take_token` does, with loops over all lanes in place of calls for each of them.
        """
        left: list[int] = []
        taken: list[PlainTokens] = []
        pieces: list[bytes] = []
        splicers: list[SplicedEvents] = []
        places: list[int] = []
        for place, (lane, token_id) in enumerate(zip(lanes, ids, strict=True)):
            spliced = lane._spliced
            if spliced is None or token_id in lane._stop_ids or not (piece := lane._pieces.get(token_id)):
                left.append(place)
                continue
            lane._generated.append(token_id)
            taken.append(lane)
            splicers.append(spliced)
            pieces.append(piece)
            places.append(place)
        if not taken:
            return left
        refused = splicers[0].push_each(splicers, pieces, now)
        if refused:  # their clients read too slowly, or are gone: `take_token` does what follows from that
            for at in reversed(refused):
                taken.pop(at)._generated.pop()
                left.append(places[at])
            left.sort()
        counters = []
        for lane in taken:
            counters.append(lane._counters)
            if lane._idle is not None:
                lane._idle.last = now
        if counters:
            counters[0].token_each(counters, now)
        return left

    def take_token(self, token_id: int, now: float) -> bool:
        """Take an id that came with nothing else; False when the reading has to go another way, or is over."""
        if token_id in self._stop_ids or (piece := self._pieces[token_id]) is None:
            return self._take_text([token_id])
        self._generated.append(token_id)
        if self._idle is not None:
            self._idle.last = now
        self._counters.tokens(1, now)
        if not piece:
            return True
        spliced = self._spliced
        if spliced is not None and spliced.push(piece, now):
            return True
        return self._output.push(piece, now)

    def take_tokens(self, ids: list[int]) -> bool:
        """Do the same for ids that came together."""
        return self.take_token(ids[0], self._now()) if len(ids) == 1 else self._take_text(ids)

    def take_items(self, items: list[StreamItem]) -> bool:
        """Take whole items, of which nearly all are token ids and nothing else."""
        ids: list[int] = []
        for item in items:
            if item.index < 0 or item.finish_reason is not None or item.extra is not None:
                return self._hand_over(items)
            ids += item.token_ids  # all in one go: a burst brings dozens of chunks at once
        return self.take_tokens(ids)

    def settle(self) -> None:
        """Report to the decoder and the tally what was taken since they last learned of it."""
        taken = len(self._generated) - self._settled
        self._settled += taken
        self._decoder.generated += taken
        self._tally.completion_tokens += taken

    def _take_text(self, ids: list[int]) -> bool:
        """Take several ids, or one whose text depends on those before it, or perhaps a stop."""
        self.settle()
        text = self._decoder.push_plain(ids)
        if text is None:
            return self._hand_over([StreamItem(0, 0, 0, ids)])
        count = len(ids)
        self._generated.extend(ids)
        self._tally.completion_tokens += count
        self._settled += count
        self._look_up()
        return self._output.send(text, count, self._now())

    def _hand_over(self, items: list[StreamItem]) -> bool:
        self.settle()
        goes_on = self._otherwise(items)
        self._settled = len(self._generated)
        self._look_up()
        return goes_on

    def _look_up(self) -> None:
        pieces = self._decoder.plain_pieces(json_text)
        self._pieces = _NO_PIECES if pieces is None else pieces


class _NoPieces(dict[int, None]):
    """Has nothing for any token."""

    def __missing__(self, token_id: int) -> None:
        return None


_NO_PIECES: Final = _NoPieces()

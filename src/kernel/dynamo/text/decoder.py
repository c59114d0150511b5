"""One choice of an answer: token ids in, text to show out, and whether a stop condition fired.

The order for each token: visible stop ids (the token's text is kept) -> hidden stop ids (the token is dropped) -> stop
strings. With `min_tokens` a stop id counts from that token on, and stop strings are searched in the text behind that
token. Every token up to and including the one that stopped is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.text.detokenizer import Detokenizer
from dynamo.text.pieces import EncodedPieces
from dynamo.text.stops import StopStrings
from dynamo.text.tokenizer import Tokenizer


class ChoiceDecoder:
    """Detokenising and local stops of one choice.

    After each `push` read `finish_reason` ("stop" once a condition fired, else None), `stop_reason` (the stop string,
    or the id of a stop token of the request) and `generated`. Once finished, further pushes change nothing: the
    caller stops the worker. When the engine ends the choice, `finish` gives what is still held back.
    """

    __slots__ = (
        "_detokenize", "_detokenizer", "_hidden", "_min_tokens", "_stop_ids", "_stops", "_unchecked", "_user_ids",
        "_visible", "finish_reason", "generated", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop_conditions: JsonMapping,
        output_options: JsonMapping,
        *,
        include_stop_str: bool,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """`stop_conditions` and `output_options` are those of the preprocessed request; an absent or null member is unset.

        `stop_token_ids` are the user's; `stop_token_ids_visible` and `stop_token_ids_hidden` are the model's ends and
        are without effect under `ignore_eos`.

        `visible`: the only special tokens that are shown, whatever `skip_special_tokens` the engine was sent.
        """
        skip = output_options.get("skip_special_tokens")
        skips = skip is None or bool(skip) or bool(visible)
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skips, visible=visible)
        self._detokenize = self._detokenizer.push  # bound once: it runs for every token
        heeds_eos = not stop_conditions.get("ignore_eos")
        self._user_ids = frozenset(stop_conditions.get("stop_token_ids") or ())
        self._visible = frozenset((heeds_eos and stop_conditions.get("stop_token_ids_visible")) or ())
        self._hidden = self._user_ids | frozenset((heeds_eos and stop_conditions.get("stop_token_ids_hidden")) or ())
        self._stop_ids = self._visible | self._hidden
        self._min_tokens = int(stop_conditions.get("min_tokens") or 0)
        stops = stop_conditions.get("stop")
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops or () if isinstance(stop, str) and stop]
        self._stops = StopStrings(stops, include=include_stop_str) if stops else None
        self._unchecked = self._stops is None  # only stop ids can end it: one set operation per push
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.generated = 0

    def push_plain(self, token_ids: Sequence[int]) -> str | None:
        """Push ids where no stop can fire, as with nearly every token; return None, doing nothing, where a stop could fire."""
        if self._unchecked and self._stop_ids.isdisjoint(token_ids):
            count = len(token_ids)
            self.generated += count
            if count == 1 and (table := self._detokenizer.whole) is not None:
                text = table[token_ids[0]]  # what `Detokenizer.push` does first, without the call
                if text is not None:
                    return text
            return self._detokenize(token_ids)
        return None

    def plain_pieces(self, encode: Callable[[str], bytes]) -> EncodedPieces | None:
        """Return the texts of single tokens, encoded, while `push_plain` would show just these for ids that are not in
        `stop_ids`; None while it would not. The code that takes them adds to `generated`, and calls again after any `push_plain`."""
        table = self._detokenizer.whole
        return table.encoded(encode) if table is not None and self._unchecked else None

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids at which the choice may end."""
        return self._stop_ids

    def push(self, token_ids: Sequence[int], text: str | None = None) -> str:
        """Return the text to show for these ids. `text`, where the engine supplies it, is shown instead of decoding them."""
        if self._unchecked and text is None and self._stop_ids.isdisjoint(token_ids):
            self.generated += len(token_ids)
            return self._detokenize(token_ids)
        if self.finish_reason is not None:
            return ""
        return self._push_ids(token_ids) if text is None else self._push_text(token_ids, text)

    def finish(self) -> str:
        """Return the text held back for a stop string or an unfinished code point. Idempotent; empty after a stop."""
        if self.finish_reason is not None:
            return ""
        tail = self._detokenizer.finish()
        if self._stops is None or not self._may_match():
            return tail
        shown, matched = self._stops.push(tail)
        if matched is not None:
            self._stop(matched)
            return shown
        return shown + self._stops.finish()

    def _may_stop(self) -> bool:
        return self.generated >= self._min_tokens

    def _may_match(self) -> bool:
        return self.generated > self._min_tokens

    def _push_ids(self, token_ids: Sequence[int]) -> str:
        # Token by token, so that neither the text nor the count depends on how the engine grouped them.
        shown: list[str] = []
        least, stop_ids, detokenize = self._min_tokens, self._stop_ids, self._detokenize
        for token_id in token_ids:
            generated = self.generated = self.generated + 1
            if token_id in stop_ids and generated >= least:
                last = detokenize((token_id,)) if token_id in self._visible else ""
                shown.append(self._held() + last + self._detokenizer.finish())
                self._stop(token_id if token_id in self._user_ids else None)
            elif generated <= least or self._stops is None:
                shown.append(detokenize((token_id,)))
            else:
                text, matched = self._stops.push(detokenize((token_id,)))
                shown.append(text)
                if matched is not None:
                    self._stop(matched)
            if self.finish_reason is not None:
                break
        return "".join(shown)

    def _push_text(self, token_ids: Sequence[int], text: str) -> str:
        # The engine's text belongs to the ids as a whole and cannot be divided among them.
        ended_by = None
        for token_id in token_ids:
            self.generated += 1
            if self._may_stop() and token_id in self._stop_ids:
                ended_by = token_id
                break
        if ended_by is not None and ended_by in self._visible:
            shown = self._held() + text
        else:
            shown = self._through_stops(text) if self._may_match() else text
        if ended_by is not None and self.finish_reason is None:
            shown += self._held()
            self._stop(ended_by if ended_by in self._user_ids else None)
        return shown

    def _held(self) -> str:
        return "" if self._stops is None else self._stops.finish()

    def _through_stops(self, text: str) -> str:
        if self._stops is None:
            return text
        shown, matched = self._stops.push(text)
        if matched is not None:
            self._stop(matched)
        return shown

    def _stop(self, reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = "stop", reason
        self._unchecked = False  # later pushes take the slow path, which shows nothing

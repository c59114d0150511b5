"""How the next token of each request is drawn.

transformers knows temperature, top-k and top-p per request, and reports probabilities after these. So its list of processors
gets one of ours that sees the model's own scores, draws the token by all of the request's options, and leaves only that token.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Self

from dynamo.contract.requests.generation import GenerationRequest
from dynamo.contract.requests.output_grammar import is_thinking
from dynamo.errors import InvalidArgument

logger = logging.getLogger(__name__)

ARGUMENT: Final = "sampling"  # the keyword of `add_request`
MINUS_INFINITY: Final = float("-inf")


class RowSampling:
    """The state of one request: what it has drawn so far, and by which rules it draws. Used by the generating thread alone."""

    def __init__(
        self, asked: GenerationRequest, ends: Sequence[int], matcher: Any = None, markers: tuple[int, int] | None = None
    ) -> None:
        """`ends`: tokens that end the answer. `matcher`: llguidance's, at the start of the request's grammar. `markers`: the
        tokens around thoughts, for a grammar that holds for what follows the thoughts.
        """
        self.asked = asked
        self.failure: Exception | None = None  # why no further token can be drawn
        self.logprobs: list[tuple[float, list[tuple[int, float]]]] = []  # per token: its own, and the best alternatives
        self._ends = list(ends)
        self._matcher = matcher
        self._markers: tuple[int, int] | tuple[None, None] = markers or (None, None)
        self._is_thinking = is_thinking(asked.prompt, markers)
        self._drawn: Counter[int] = Counter()
        self._generator: Any = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self  # transformers copies a request's arguments where it computes the request again: its draws stay

    def draw(self, scores: Any) -> int:
        """Return the next token. `scores`: the model's, a float32 tensor with one entry per token of the vocabulary.

        Raises InvalidArgument when the grammar cannot be followed further.
        """
        import torch

        asked = self.asked
        row = self._penalised(scores)
        waits = self._matcher is not None and self._is_thinking  # an end there would leave out all that must come
        if waits or (asked.min_tokens and self._drawn.total() < asked.min_tokens):
            row[self._ends] = MINUS_INFINITY
        if asked.allowed_token_ids is not None:
            allowed = torch.full_like(row, MINUS_INFINITY)
            kept = [*asked.allowed_token_ids, *self._ends]
            allowed[kept] = row[kept]
            row = allowed
        if self._matcher is not None and not self._is_thinking:
            row = self._constrained(row)
        token = int(row.argmax()) if asked.temperature == 0 else self._drawn_by_chance(row)
        if asked.logprobs is not None:
            self._record(scores, token, asked.logprobs)
        if self._matcher is not None:
            self._follow(token)
        self._drawn[token] += 1
        return token

    def _penalised(self, scores: Any) -> Any:
        import torch

        asked, row = self.asked, scores.clone()
        if asked.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*asked.prompt, *self._drawn}), device=row.device)
            held = row[seen]
            row[seen] = torch.where(held > 0, held / asked.repetition_penalty, held * asked.repetition_penalty)
        if self._drawn and (asked.presence_penalty or asked.frequency_penalty):
            tokens = torch.tensor(list(self._drawn), device=row.device)
            times = torch.tensor(list(self._drawn.values()), device=row.device, dtype=row.dtype)
            row[tokens] -= asked.presence_penalty + asked.frequency_penalty * times
        for token, bias in asked.logit_bias.items():
            row[token] += bias
        return row

    def _constrained(self, row: Any) -> Any:
        import torch

        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if self._matcher.is_error():
            raise InvalidArgument(f"guided_decoding cannot be followed: {self._matcher.get_error()}")
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        mask = torch.zeros(row.shape[0], dtype=torch.bool)
        known = bits.flatten()[: row.shape[0]].bool()
        mask[: known.shape[0]] = known
        mask[self._ends] = self._matcher.is_accepting()
        begin, _ = self._markers
        if not self._drawn and begin is not None:
            mask[begin] = True
        if not mask.any():  # nothing can follow, and no end token is known: the request ends at its limit
            raise InvalidArgument("guided_decoding: the grammar allows no further token")
        return row.masked_fill(~mask.to(row.device), MINUS_INFINITY)

    def _follow(self, token: int) -> None:
        """Go on in the grammar by one drawn token. Thoughts, and the tokens around them, are not of the grammar."""
        begin, end = self._markers
        if self._is_thinking:
            self._is_thinking = token != end
        elif not self._drawn and token == begin:
            self._is_thinking = True
        elif token not in self._ends and not self._matcher.consume_token(token):
            raise InvalidArgument(f"guided_decoding cannot be followed: {self._matcher.get_error()}")

    def _drawn_by_chance(self, row: Any) -> int:
        import torch

        asked = self.asked
        row = row / asked.temperature
        if 0 < asked.top_k < row.shape[0]:
            row = row.masked_fill(row < torch.topk(row, asked.top_k).values[-1], MINUS_INFINITY)
        if asked.top_p < 1.0:
            ordered, places = torch.sort(row, descending=True)
            chances = torch.softmax(ordered, -1)
            beyond = chances.cumsum(-1) - chances >= asked.top_p  # the token that crosses the sum stays
            beyond[0] = False
            row = row.scatter(0, places, ordered.masked_fill(beyond, MINUS_INFINITY))
        chances = torch.softmax(row, -1)
        if asked.min_p > 0.0:
            chances = chances.masked_fill(chances < asked.min_p * chances.max(), 0.0)
        if asked.seed is not None and self._generator is None:
            self._generator = torch.Generator(device=row.device)
            self._generator.manual_seed(asked.seed % 2**63)
        return int(torch.multinomial(chances, 1, generator=self._generator))

    def _record(self, scores: Any, token: int, count: int) -> None:
        import torch

        found = torch.log_softmax(scores, -1)
        best: list[tuple[int, float]] = []
        if count:
            top = torch.topk(found, min(count, found.shape[0]))
            best = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        self.logprobs.append((float(found[token]), best))


class RowSampler:
    """The processor in transformers' list: one row of scores for each request that gets a token in this step."""

    supported_kwargs: Final = {ARGUMENT: RowSampling}
    ignored_kwargs: Final = ()

    def __init__(self) -> None:
        self._rows: list[RowSampling] = []

    def fill_defaults(self, int32_tensor: Any) -> None:
        """Fill the storage of this processor's arguments, which are not tensors."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Any:
        """Note the requests of the step, in the order of its rows; return a placeholder of their number."""
        import torch

        self._rows = [request.state.logit_processor_kwargs[ARGUMENT] for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: Any) -> Any:
        """Return scores that leave each row its one drawn token. `scores`: rows by vocabulary, float32."""
        import torch

        chosen = torch.full_like(scores, MINUS_INFINITY)
        for place, row in enumerate(self._rows):
            chosen[place, self._token(row, scores[place])] = 0.0
        return chosen

    @staticmethod
    def _token(row: RowSampling, scores: Any) -> int:
        try:
            return row.draw(scores)
        except (
            Exception
        ) as error:  # of this request alone: raised here it would end the loop, and with it every request
            if row.failure is None and not isinstance(error, InvalidArgument):
                logger.exception("a token could not be drawn")
            row.failure = error
            return 0

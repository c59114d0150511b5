"""One step of the engine: plan, compute, sample, commit. Synchronous, and used by one thread at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynamo.errors import InvalidArgument
from dynamo.reference.blocks import BlockEvent, BlockPool
from dynamo.reference.lora import Adapter
from dynamo.reference.model import KvCache, Piece, TransformerModel, make_batch
from dynamo.reference.pooling import InputJob, Pooled, RunningInput
from dynamo.reference.request import Job, Limits
from dynamo.reference.sampler import (
    Drawn,
    History,
    Sampling,
    Stop,
    bad_word_ends,
    draw,
    ending,
    log_softmax,
    top_entries,
)
from dynamo.reference.scheduler import Scheduler, Sequenced, Work
from dynamo.reference.steering import Steering
from dynamo.reference.tensor_files import Array
from dynamo.reference.weights import NO_WEIGHTS, Weights

PromptEntry = tuple[int, int, float]  # token, rank from 1, logprob


@dataclass(slots=True, eq=False)
class RunningChoice:
    """One of the answers to a request, on its way."""

    sequence: Sequenced
    number: int
    prompt_tokens: int  # as the client sent it
    sampling: Sampling
    stop: Stop
    history: History
    is_plain: bool  # the most likely token, whatever was before it; only `min_tokens` may still stand against it
    steering: Steering | None = None
    adapter: Adapter | None = None
    pictured: int | None = None  # where the first code of a picture is; None: nowhere
    generated: int = 0  # tokens drawn here, also one that ended the choice and is not shown
    keeps: bool = False  # its blocks outlive it when it ends with "length": another worker goes on
    prompt_logprobs: int | None = None
    prompt_entries: list[tuple[PromptEntry, ...]] = field(default_factory=list)  # of the prompt's second token on


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step made of one choice."""

    choice: RunningChoice
    drawn: Drawn
    shown: bool  # whether the token is part of the output
    reason: str | None  # set: the choice has ended


@dataclass(frozen=True, slots=True)
class Failure:
    """A choice that cannot go on, and why; it has ended, and the others of its request should."""

    choice: RunningChoice
    error: InvalidArgument


class Core:
    """A model, its cache, and the sequences that use them."""

    def __init__(
        self,
        model: TransformerModel,
        *,
        blocks: int,
        block_size: int,
        context_length: int,
        max_sequences: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        """`context_length` tokens must fit into the cache's blocks."""
        self.model = model
        self.pool = BlockPool(blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(self.pool, max_sequences=max_sequences, max_step_tokens=max_step_tokens)
        config = model.config
        self.limits = Limits(
            config.vocab_size, context_length, config.eos_token_ids, config.sampling, vision=config.vision
        )
        self.prompt_tokens = self.cached_tokens = 0  # of all choices admitted so far; the hit rate is their ratio
        self.adapters: dict[str, Adapter] = {}  # by name; bounded by the code that adds them
        self.is_halted = False  # no step computes; what there is waits
        self.cache = KvCache(model.config, blocks, block_size)
        self._choices: dict[Sequenced, RunningChoice] = {}
        self._inputs: dict[Sequenced, RunningInput] = {}  # to be made vectors of
        self._pooled: list[Pooled] = []  # vectors that are ready

    @property
    def is_idle(self) -> bool:
        """There is nothing to compute now."""
        return self.is_halted or self.scheduler.is_idle

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found in the cache; None before the first prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def add(self, job: Job, *, keep: bool = False, arrives: bool = False) -> list[RunningChoice]:
        """Queue a request; one choice each of `job.choices`. Choices of one prompt share its blocks once it is computed.

        `keep`: a choice that ends with "length" holds its blocks until `abort`. `arrives`: the prompt is computed
        elsewhere; `take_reserved` names the choice when there is room for it, and it goes on after `received`.
        """
        choices = [self._choice(job, number) for number in range(job.choices)]
        for choice in choices:
            choice.keeps, choice.sequence.arrives = keep, arrives
            self.scheduler.add(choice.sequence)
            self._choices[choice.sequence] = choice
        return choices

    def add_inputs(self, jobs: Sequence[InputJob]) -> list[RunningInput]:
        """Queue inputs of which vectors are to be made."""
        added: list[RunningInput] = []
        for index, job in enumerate(jobs):
            # Every hidden state is needed, so nothing of it may come from the cache.
            sequence = Sequenced(list(job.prompt), job.priority, job.key, may_share=False, generates=False)
            sequence.may_name = job.adapter is None or self.adapters.get(job.adapter.name) is job.adapter
            running = RunningInput(sequence, job, index)
            try:
                self.scheduler.add(sequence)
            except InvalidArgument:
                self.abort(added)
                raise
            self._inputs[sequence] = running
            added.append(running)
        return added

    def abort(self, choices: Iterable[RunningChoice | RunningInput]) -> None:
        """Drop choices wherever they are; their blocks are free on return, also those that were kept."""
        for choice in choices:
            self._choices.pop(choice.sequence, None)
            self._inputs.pop(choice.sequence, None)
            self.scheduler.finish(choice.sequence)

    def take_reserved(self) -> list[RunningChoice]:
        """Choices whose blocks are held now and may be filled, those that were aborted meanwhile left out."""
        return [self._choices[s] for s in self.scheduler.take_reserved() if s in self._choices]

    def take_pooled(self) -> list[Pooled]:
        """Return the vectors that were made since the last call."""
        pooled, self._pooled = self._pooled, []
        return pooled

    def received(self, choice: RunningChoice, tokens: int) -> None:
        """Go on with the first `tokens` tokens of the prompt in the choice's blocks; 0: the transfer brought none."""
        self.scheduler.received(choice.sequence, tokens)

    def step(self) -> list[Emission | Failure]:
        """Compute what fits into one step; what came out of it, in no particular order."""
        plan = [] if self.is_halted else self.scheduler.plan()
        if not plan:
            return []
        pieces = [self._piece(work) for work in plan]
        batch = make_batch(pieces, self.pool.block_size)
        hidden = self.model.forward(batch, self.cache)
        sampling = []
        for number, (work, last) in enumerate(zip(plan, batch.last_rows, strict=True)):
            if self._inputs and work.sequence in self._inputs:
                self._pool(work, hidden[int(last) + 1 - work.count : int(last) + 1])
                continue
            self._note_prompt(work, hidden, int(last))
            if work.samples:
                sampling.append(number)
            else:
                self.scheduler.computed(work)
        return self._sample([plan[n] for n in sampling], hidden[batch.last_rows[sampling]]) if sampling else []

    def clear_cache(self) -> int:
        """Forget all cached prefixes; how many blocks had one. Sequences keep theirs."""
        return self.pool.clear()

    def release(self, *, weights: bool) -> None:
        """Halt, and let the memory of the KV cache go, with `weights` theirs too. No sequence loses a token.

        Raises InvalidArgument, and goes on, while another worker reads from the cache or writes to it.
        """
        self.scheduler.preempt_all()
        if self.pool.held:
            raise InvalidArgument(f"{self.pool.held} KV blocks are on their way to or from another worker; try again")
        self.is_halted = True
        self.pool.clear()
        self.cache.release()
        if weights:
            self.model.weights = NO_WEIGHTS

    def restore(self, weights: Weights | None) -> None:
        """Allocate the memory again, and load `weights` if the weights were released. The core stays halted."""
        self.cache.restore()
        if weights is not None:
            self.model.weights = weights

    def replace_weights(self, weights: Weights) -> None:
        """Go on with other weights of the same shapes; what the old ones computed is computed again."""
        self.scheduler.preempt_all()
        self.pool.clear()
        self.model.weights = weights

    def add_adapter(self, adapter: Adapter) -> None:
        """Know an adapter. One of the same name is replaced."""
        self.remove_adapter(adapter.name)
        self.adapters[adapter.name] = adapter

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. Sequences that use it finish with it, and share nothing under its name any more."""
        if self.adapters.pop(name, None) is None:
            return
        self.pool.clear()
        running: list[RunningChoice | RunningInput] = [*self._choices.values(), *self._inputs.values()]
        for choice in running:
            if choice.adapter is not None and choice.adapter.name == name:
                choice.sequence.may_share = choice.sequence.may_name = False

    def take_events(self) -> list[BlockEvent]:
        """Return changes of the prefix cache since the last call."""
        return self.pool.take_events()

    def _choice(self, job: Job, number: int) -> RunningChoice:
        sequence = Sequenced(
            list(job.prompt),
            priority=job.priority,
            key=job.key,
            may_share=job.prompt_logprobs is None,
            routed=job.routed,
        )
        if job.adapter is not None and self.adapters.get(job.adapter.name) is not job.adapter:  # unloaded meanwhile
            sequence.may_share = sequence.may_name = False
        original = len(job.prompt) - job.produced
        return RunningChoice(
            sequence=sequence,
            number=number,
            prompt_tokens=original,
            sampling=job.sampling,
            stop=job.stop,
            history=History(frozenset(self._words(job, original)), Counter(job.prompt[original:])),
            is_plain=job.sampling.is_plain and job.steering is None,
            steering=None if job.steering is None else job.steering.copy(),
            adapter=job.adapter,
            pictured=job.pictured,
            prompt_logprobs=job.prompt_logprobs if number == 0 else None,
        )

    def _words(self, job: Job, original: int) -> tuple[int, ...]:
        """Return the tokens of the client's prompt, without those of pictures."""
        prompt = job.prompt[:original]
        if job.pictured is None:
            return prompt
        return tuple(token for token in prompt if token < self.limits.vocab_size)

    def _piece(self, work: Work) -> Piece:
        sequence = work.sequence
        tokens = sequence.tokens[work.start : work.start + work.count]
        running = self._choices.get(sequence)
        if running is None:
            return Piece(tokens, work.start, sequence.blocks, self._inputs[sequence].adapter)
        if running.pictured is None:
            return Piece(tokens, work.start, sequence.blocks, running.adapter)
        sight = self.model.weights.sight
        return Piece(tokens, work.start, sequence.blocks, running.adapter, sight, running.pictured)

    def _pool(self, work: Work, hidden: Array) -> None:
        """Take the hidden states of one piece of an input; behind the last one its vector is ready."""
        running = self._inputs[work.sequence]
        running.take(hidden, work.start)
        self.scheduler.computed(work)
        if work.samples:
            del self._inputs[work.sequence]
            self.scheduler.finish(work.sequence)
            self._pooled.append(Pooled(running, running.result(self.model.weights)))

    def _sample(self, works: Sequence[Work], hidden: Array) -> list[Emission | Failure]:
        logits = self.model.logits(hidden)
        best = logits.argmax(axis=1)  # for nearly all of a greedy batch this one call is all there is to do
        return [self._advance(work, logits[row], int(best[row])) for row, work in enumerate(works)]

    def _advance(self, work: Work, logits: Array, best: int) -> Emission | Failure:
        choice = self._choices[work.sequence]
        if choice.generated == 0:
            self.prompt_tokens += len(work.sequence.tokens)
            self.cached_tokens += work.sequence.cached
        try:
            drawn, reason, shown = self._draw(choice, logits, best)
        except InvalidArgument as error:
            self.abort([choice])
            return Failure(choice, error)
        self.scheduler.computed(work, drawn.token if reason is None else None)
        if reason is not None:
            self._choices.pop(choice.sequence, None)
            self.scheduler.finish(choice.sequence, keep=choice.keeps and reason == "length")
        return Emission(choice, drawn, shown, reason)

    def _draw(self, choice: RunningChoice, logits: Array, best: int) -> tuple[Drawn, str | None, bool]:
        """Return (token, why the choice ends with it if it does, whether it is output)."""
        stop, steering = choice.stop, choice.steering
        is_best = choice.is_plain and choice.generated >= stop.min_tokens
        drawn = Drawn(best) if is_best else self._choose(choice, logits)
        choice.generated += 1
        if not is_best and choice.sampling.penalises:
            choice.history.generated[drawn.token] += 1
        reason, shown = ending(drawn.token, choice.generated, stop)
        if steering is not None and reason in (None, "length"):
            steering.accept(drawn.token)
            if steering.is_complete:
                reason = "eos"  # what the model would have to yield next, so it need not be computed
        return drawn, reason, shown

    def _choose(self, choice: RunningChoice, logits: Array) -> Drawn:
        stop, sampling, tokens = choice.stop, choice.sampling, choice.sequence.tokens
        banned = list(stop.all) if choice.generated < stop.min_tokens else []
        if sampling.bad_words:
            banned += bad_word_ends(sampling.bad_words, tokens)
        allowed = None
        if choice.steering is not None:
            allowed = choice.steering.allowed([*stop.eos, *stop.hidden], len(logits))
        return draw(
            logits,
            sampling,
            choice=choice.number,
            position=len(tokens),
            history=choice.history,
            banned=banned,
            allowed=allowed,
        )

    def _note_prompt(self, work: Work, hidden: Array, last: int) -> None:
        """Log probabilities of the prompt tokens that this piece predicts; a preempted prompt is not noted twice."""
        choice = self._choices[work.sequence]
        if choice.prompt_logprobs is None:
            return
        begin = max(work.start, len(choice.prompt_entries))
        end = min(work.start + work.count, choice.prompt_tokens - 1)
        if begin >= end:
            return
        shift = last + 1 - work.count - work.start  # from position to row
        logits = self.model.logits(hidden[begin + shift : end + shift])
        for row, position in zip(logits, range(begin, end), strict=True):
            entry = _prompt_entry(row, work.sequence.tokens[position + 1], choice.prompt_logprobs)
            choice.prompt_entries.append(entry)


def _prompt_entry(logits: Array, token: int, count: int) -> tuple[PromptEntry, ...]:
    own = log_softmax(logits)
    rank = int(np.count_nonzero(own > own[token])) + 1
    others = [(other, place, value) for place, (other, value) in enumerate(top_entries(own, count), 1)]
    return ((token, rank, float(own[token])), *(entry for entry in others if entry[0] != token))

"""The two halves of a disaggregated request: prefill holds what it computed, decode fetches it and goes on.

The decode worker takes the keys and values of all prompt tokens but the last, which it computes itself: so the first
token is drawn where all others are, with everything a request may need of it. It is the same token that the prefill
worker drew, because randomness depends on (seed, choice, position) only and the ticket carries the seed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec

from dynamo.contract.health_check import is_probe
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.disaggregation import (
    enforce_prefill_max_tokens,
    extract_prefill_result,
    require_prefill_result,
)
from dynamo.errors import DynamoException, InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.reference.core import RunningChoice
from dynamo.reference.kv_transfer import KvReceiver, KvSender, Ticket, TransferOptions, make_receiver, make_sender
from dynamo.reference.media import NO_MEDIA, MediaOptions, MediaPrompt
from dynamo.reference.model import KvCache
from dynamo.reference.request import Job
from dynamo.runtime.base.tasks import first_of
from dynamo.runtime.calls.context import Context
from dynamo.runtime.observe.metrics import TypedFamily

logger = logging.getLogger(__name__)

OFFERS: Final = "reference_kv_offers"
TRANSFERS: Final = "reference_kv_transfers_total"

RELEASE_SECONDS: Final = 2.0  # for reporting to the peer that its blocks are not needed; they expire without that, too


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """What a worker does of a request."""

    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    transfer: TransferOptions = field(default_factory=TransferOptions)
    require_prefill_result: bool = False
    media: MediaOptions = field(default_factory=MediaOptions)

    async def make(self, cache: KvCache) -> PrefillRole | DecodeRole | None:
        """Set up what the role needs; None for a worker that serves whole requests. Raises CannotConnect, InvalidArgument."""
        # In a thread, because NIXL takes a second to start.
        if self.mode is DisaggregationMode.DECODE:
            make = partial(DecodeRole, cache, self.transfer, required=self.require_prefill_result)
            return await asyncio.to_thread(make)
        if self.mode is DisaggregationMode.PREFILL:
            role = await asyncio.to_thread(PrefillRole, cache, self.transfer)
            try:
                await role.start()
            except BaseException:
                await role.close()
                raise
            return role
        return None


class PrefillRole:
    """What an engine does beside computing when it only computes prompts."""

    def __init__(self, cache: KvCache, options: TransferOptions) -> None:
        """Raises InvalidArgument for a transport that is not installed."""
        self._sender: KvSender = make_sender(cache, options)
        self._ends = dict.fromkeys(("fetched", "expired", "closed"), 0)  # offers that ended, by why

    async def start(self) -> None:
        """Raises CannotConnect when the address cannot be had."""
        await self._sender.start()

    async def close(self) -> None:
        """End every offer, after a moment for workers that are fetching."""
        await self._sender.close()

    @property
    def is_quiescent(self) -> bool:
        """Whether no peer may come for blocks any more."""
        return self._sender.offers == 0

    def metrics(self, labels: Mapping[str, str]) -> list[TypedFamily]:
        """Return the text for `/metrics`; `labels` are on every series."""
        common = [*labels.items()]
        offers = [(OFFERS, common, self._sender.offers)]
        return [
            (OFFERS, "Computed prompts whose KV blocks are held for a decode worker", "gauge", offers),
            _outcomes("Computed prompts that are held no more, by why", common, self._ends),
        ]

    def narrowed(self, request: JsonMapping) -> JsonObject:
        """Return the request for one token. Raises InvalidArgument for several choices: each would need a hand-off of its own."""
        if ((request.get("sampling_options") or {}).get("n") or 1) != 1:
            raise InvalidArgument("sampling_options.n must be 1 on a prefill worker: send one request for each choice")
        stops = dict(request.get("stop_conditions") or {})
        return enforce_prefill_max_tokens({**request, "stop_conditions": stops})

    def hand_over(self, choice: RunningChoice, let_go: Callable[[], None], media: MediaPrompt = NO_MEDIA) -> JsonObject:
        """Hold a choice's blocks; `let_go` is called once when they may be freed. `media`: those of its prompt.

        Raises Overloaded.
        """

        def ended(reason: str) -> None:
            self._ends[reason] += 1
            if reason == "expired":
                logger.warning("a prompt of %d tokens was not fetched in time; its KV blocks are freed", tokens)
            let_go()

        tokens = len(choice.sequence.tokens)
        ticket = self._sender.offer(choice.sequence.blocks, tokens, choice.sampling.seed, ended)
        ticket = msgspec.structs.replace(ticket, media_token_ids=media.token_ids, media_hashes=media.hashes)
        return ticket.to_params()


class DecodeRole:
    """What an engine does before computing when others compute its prompts."""

    def __init__(self, cache: KvCache, options: TransferOptions, *, required: bool = False) -> None:
        """`required`: refuse requests without a prefill result, instead of computing their prompts.

        Raises InvalidArgument for a transport that is not installed.
        """
        self._cache, self._required = cache, required
        self._ends = dict.fromkeys(("fetched", "failed", "unwanted"), 0)  # prompts that others had computed
        self._receiver: KvReceiver = make_receiver(cache.layout, options)

    async def close(self) -> None:
        """Close the receiver. Call `close` only while no pull is running."""
        await self._receiver.close()

    def metrics(self, labels: Mapping[str, str]) -> list[TypedFamily]:
        """Return the text for `/metrics`; `labels` are on every series."""
        return [
            _outcomes("Prompts that a prefill worker had computed, by what came of it", [*labels.items()], self._ends)
        ]

    def ticket(self, request: JsonMapping) -> Ticket | None:
        """Return the place of the request's blocks; None: compute the prompt here. Raises InvalidArgument."""
        result = extract_prefill_result(request)
        if result is None:
            if self._required and not is_probe(request):
                try:
                    require_prefill_result(request)
                except ValueError as error:
                    raise InvalidArgument(str(error)) from error
            return None
        return Ticket.from_params(result.get("disaggregated_params"))

    def continued(self, job: Job, request: JsonMapping, ticket: Ticket) -> Job:
        """Return the job as the prefill worker parsed it: a seed chosen by the prefill worker is kept."""
        if (request.get("sampling_options") or {}).get("seed") is not None:
            return job
        return replace(job, sampling=replace(job.sampling, seed=ticket.seed))

    def can_take(self, job: Job, ticket: Ticket, context: Context) -> bool:
        """Fetch the blocks; return whether the fetch succeeded; if not, log why the prompt is computed here."""
        if ticket.layout != self._cache.layout:
            why = f"the prefill worker's KV blocks are {ticket.layout}, these are {self._cache.layout}"
        elif ticket.tokens != len(job.prompt):
            why = f"{ticket.tokens} of its {len(job.prompt)} tokens were computed"
        elif job.choices > 1:
            why = "its choices are made together"
        elif job.prompt_logprobs is not None:
            why = "its log probabilities are asked for"
        else:
            return True
        logger.warning("request %s: its prompt is computed here: %s", context.id(), why)
        return False

    async def fetch(self, ticket: Ticket, choice: RunningChoice, context: Context) -> int:
        """Fill the blocks of a reserved choice; how many of its tokens they hold then. 0: the prompt is computed here.

        Returns early when the context is stopped. Nothing writes to the blocks after the return.
        """
        sequence, size = choice.sequence, self._cache.block_size
        wanted = len(sequence.tokens) - 1
        first = sequence.computed // size  # found in the cache here
        count = max(-(-wanted // size) - first, 0)

        def put(number: int, page: memoryview) -> None:
            self._cache.put_page(sequence.blocks[number], page)

        try:
            pull = self._receiver.pull(ticket, first, count, put)
            if await first_of(pull, context.async_killed_or_stopped()) != 0:
                await self.release(ticket)
                return 0
            self._ends["fetched"] += 1
            return wanted
        except DynamoException as error:
            self._ends["failed"] += 1
            logger.warning(
                "request %s: its KV blocks could not be fetched and its prompt is computed here (%s: %s)",
                context.id(),
                type(error).__name__,
                error,
            )
            return 0

    async def release(self, ticket: Ticket) -> None:
        """Report to the peer that its blocks are not needed; at most `RELEASE_SECONDS`."""
        self._ends["unwanted"] += 1
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._receiver.pull(ticket, 0, 0, lambda number, page: None)
        except (DynamoException, TimeoutError) as error:
            logger.info("%r was not released, and expires (%s: %s)", ticket, type(error).__name__, error)


def _outcomes(help: str, labels: list[tuple[str, str]], counts: Mapping[str, int]) -> TypedFamily:
    samples = [(TRANSFERS, [*labels, ("outcome", outcome)], count) for outcome, count in counts.items()]
    return TRANSFERS, help, "counter", samples

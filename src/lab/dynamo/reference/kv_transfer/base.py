"""What every transport of KV blocks promises, and the messages of its two sides through the frontend.

A prefill worker *offers* the blocks of a prompt and gets a `Ticket`, which travels as `disaggregated_params`. A decode
worker *pulls* with it. Promises, held by one set of tests over all transports:

* An offer ends exactly once: `ended` is called when the blocks were fetched, when no peer came in time, or when the
  sender closes. Until then no other code may write to them; afterwards no peer reads them.
* A pull returns only when every page arrived whole and the peer confirmed that it still held the offer: pages of a peer
  that had given up in between are never passed for good ones.
* Nothing waits for ever: an offer lives `hold_seconds`, and a pull that has begun `pull_seconds`. A lost peer ends a
  pull at once and leaves the offer to the next peer with its ticket, until it expires. A peer that comes with a ticket
  while another is pulling with it takes over.
* Only the ticket's secret opens an offer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.settings.extras import install_command

FLOAT32_BYTES: Final = 4

NIXL_PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")  # any of them; each is the whole of NIXL


def nixl_missing() -> str:
    """Return why `--kv-transfer nixl` cannot be used, and what to do."""
    return f"--kv-transfer nixl needs the nixl extra: {install_command('nixl')}, or use --kv-transfer tcp"


Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
ContentHash = Annotated[int, msgspec.Meta(ge=0)]
MAX_MEDIA: Final = 32
MAX_MEDIA_TOKENS: Final = MAX_MEDIA * 1024


class Layout(msgspec.Struct, frozen=True):
    """The shape of one block; two workers must agree on it.

    A block travels as a *page*: float32, little-endian, (keys and values, layers, heads, tokens, head_dim), packed.
    """

    layers: Size
    kv_heads: Size
    block_size: Size  # tokens
    head_dim: Size

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.block_size * self.head_dim * FLOAT32_BYTES


class Ticket(msgspec.Struct, frozen=True):
    """Where a prompt's blocks are, and the right to fetch them once."""

    transport: str  # the sender's; every sender also speaks "tcp"
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    secret: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    tokens: Size  # of the prompt: what the blocks hold
    layout: Layout
    seed: int  # what the first token was drawn with: the continuing worker must draw the same one
    # Before the prompt, where its request had media: the decode worker gets the prompt without them.
    media_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_MEDIA_TOKENS)] = ()
    media_hashes: Annotated[tuple[ContentHash, ...], msgspec.Meta(max_length=MAX_MEDIA)] = ()  # of their content

    def to_params(self) -> dict[str, object]:
        """Encode the fields as `disaggregated_params`."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_params(cls, params: object) -> Ticket:
        """Raises InvalidArgument naming the member that is wrong."""
        try:
            return msgspec.convert(params, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"prefill_result.disaggregated_params: {error}") from error

    def __repr__(self) -> str:  # never the secret: this is what ends up in logs
        return f"Ticket({self.transfer_id} at {self.host}:{self.port}, {self.tokens} tokens)"


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How blocks travel. Raises InvalidArgument, with the flag's name, for what cannot be."""

    transport: str = "tcp"
    host: str | None = None  # to listen on and to advertise; None: this machine's own address
    port: int = 0  # 0: any free one
    hold_seconds: float = 30.0  # longer than a decode worker's queue should be; the blocks are lost to others meanwhile
    pull_seconds: float = 30.0  # a prompt of 100,000 tokens over 1 Gbit/s takes about as long

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidArgument(f"--kv-transfer-port must be in 0..65535, got {self.port}")
        for name in ("hold_seconds", "pull_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                flag = f"--kv-{name.replace('_', '-')}"
                raise InvalidArgument(f"{flag} must be above 0 and at most 86400, got {getattr(self, name):g}")


Ended = Callable[[str], None]
"""Called once, on the event loop, when an offer has ended; with why: "fetched", "expired" or "closed"."""

PageSink = Callable[[int, memoryview], None]
"""Called with each block's position in the prompt and its page, in order; the page is only valid during the call."""


class BlockSource(Protocol):
    """The cache that pages are read from; a `dynamo.reference.model.KvCache`."""

    @property
    def layout(self) -> Layout: ...

    def page(self, block: int) -> bytes:
        """Return one block, packed."""

    def arrays(self) -> JsonMapping:
        """Return `keys` and `values`, for transports that read memory directly."""


class KvSender(Protocol):
    """A prefill worker's side."""

    async def start(self) -> None:
        """Listen. Raises CannotConnect when the address cannot be had."""

    def offer(self, blocks: Sequence[int], tokens: int, seed: int, ended: Ended) -> Ticket:
        """Hold `blocks`, which contain `tokens` tokens, for the peer that brings the ticket. Raises Overloaded when full."""

    @property
    def offers(self) -> int:
        """How many have not ended."""

    async def close(self) -> None:
        """Wait for pulls that have begun, for a moment, then end every offer. Idempotent."""


class KvReceiver(Protocol):
    """A decode worker's side."""

    async def pull(self, ticket: Ticket, first: int, count: int, sink: PageSink) -> None:
        """Fetch `count` blocks from position `first` on, and end the offer; 0 blocks only end it.

        Raises:
            InvalidArgument: the two workers' blocks have different shapes.
            CannotConnect, Disconnected, ConnectionTimeout: the peer is not there, was lost, or did not answer in time.
            StreamIncomplete: the peer does not hold this offer (any more), or what came was damaged.
        """

    async def close(self) -> None:
        """Let go of what was kept for later pulls; those that run fail. Idempotent."""

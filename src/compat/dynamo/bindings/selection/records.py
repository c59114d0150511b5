"""What callers of a `SelectionService` give and get: workers, prompts, refusals. No state."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from dynamo.errors import SelectionServiceError
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_query import RankInfo

T = TypeVar("T")

DEFAULT: Final = "default"  # the model and the routing group of what names none
STATUSES: Final = {"not_ready": 503, "not_found": 404, "conflict": 409}
MAX_WORKER_RANKS: Final = 4096  # a worker with more is a mistake, and each rank has a socket

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class PoolName(NamedTuple):
    """The workers that serve the same prompts."""

    model: str
    routing_group: str

    def __str__(self) -> str:
        return f"model={self.model} routing_group={self.routing_group}"


class SelectionCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long, and how many, selections wait for their reservation; beyond a bound the oldest is forgotten."""

    ttl_secs: float = 120.0
    max_entries: int = 4096
    max_bytes: int = 268_435_456

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:  # NaN is not, either
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)!r}")


class WorkerRecord(msgspec.Struct, kw_only=True):
    """One worker as it registers. Unknown members are ignored."""

    worker_id: Count
    model_name: str = DEFAULT
    routing_group: str = DEFAULT
    endpoint: str | None = None
    block_size: Count | None = None
    data_parallel_start_rank: Rank = 0
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKER_RANKS)] = 1
    kv_events_endpoints: dict[Rank, str] = {}
    replay_endpoint: str | None = None
    max_num_batched_tokens: Count | None = None
    total_kv_blocks: Count | None = None
    stable_routing_id: str | None = None
    is_eagle: bool = False
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Literal["required", "preferred"] | None = None
    kv_transfer_preferred_weight: float | None = None

    @property
    def pool(self) -> PoolName:
        return PoolName(self.model_name, self.routing_group)

    @property
    def ranks(self) -> list[WorkerRank]:
        """Its data-parallel ranks."""
        first = self.data_parallel_start_rank
        return [WorkerRank(self.worker_id, rank) for rank in range(first, first + self.data_parallel_size)]

    @property
    def facts(self) -> RankInfo:
        """What a router goes by, the same for each rank."""
        return RankInfo(
            total_kv_blocks=self.total_kv_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            taints=frozenset(self.taints),
            topology=self.topology_domains,
        )

    def lacks(self) -> list[str]:
        """Return why no prompt can go there; empty: one can."""
        reasons = [] if self.endpoint else ["endpoint is required"]
        if not self.block_size:
            reasons.append("block_size must be greater than 0")
        silent = [rank.dp_rank for rank in self.ranks if not self.kv_events_endpoints.get(rank.dp_rank)]
        return reasons + [f"kv_events endpoint is required for dp_rank {rank}" for rank in silent]

    def shown(self) -> dict[str, Any]:
        """Return the record as callers get it."""
        reasons = self.lacks()
        return {
            **msgspec.structs.asdict(self),
            "lifecycle": "incomplete" if reasons else "schedulable",
            "not_schedulable_reasons": reasons,
        }


class PinnedWorker(msgspec.Struct):
    """The one worker, and the rank of it, that a request may go to."""

    worker_id: Count
    dp_rank: Rank | None = None


class SelectionRequest(msgspec.Struct, kw_only=True):
    """A prompt, by its tokens or by its hashes, and where it may go. Unknown members are ignored."""

    model_name: str = DEFAULT
    routing_group: str = DEFAULT
    selection_id: str | None = None
    session_id: str | None = None
    token_ids: list[Token] | None = None
    block_hashes: list[int] | None = None  # of each block's own tokens, signed or unsigned 64-bit
    sequence_hashes: list[int] | None = None  # their names in the account of loads
    isl_tokens: Count | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    track_prefill_tokens: bool = True
    allowed_worker_ids: list[Count] | None = None
    pinned_worker: PinnedWorker | None = None

    @property
    def pool(self) -> PoolName:
        return PoolName(self.model_name, self.routing_group)


class ReservationRequest(SelectionRequest, kw_only=True):
    """A selection that was made before, by its id; or, with `worker_id`, a prompt that goes there."""

    worker_id: Count | None = None
    dp_rank: Rank | None = None
    effective_prefill_tokens: Count | None = None


class ChosenRank(msgspec.Struct, frozen=True, gc=False):
    """A selection, as far as it takes part in a reservation."""

    pool: PoolName
    rank: WorkerRank
    sequence: Sequence[int]  # what is booked
    prompt_tokens: int
    cached_tokens: int
    tracks_prefill: bool = True
    session_id: str | None = None

    @property
    def size(self) -> int:
        """The bytes that it takes, about."""
        return 512 + 40 * len(self.sequence) + sys.getsizeof(self.session_id or "")


def refusal(kind: str, message: str) -> SelectionServiceError:
    """Return the error of a request that cannot be served now."""
    error = SelectionServiceError(kind, STATUSES[kind])
    error.args = (message,)  # `dynamo.errors` writes a text for frontends; callers of the bindings read this one
    return error


def read(kind: type[T], given: Mapping[str, object]) -> T:
    """Return a record of what a caller gave. Raises ValueError that names the member."""
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a dict, got {type(given).__name__}")
    if kind is WorkerRecord and "worker_id" not in given:
        raise ValueError("missing field `worker_id`")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except OverflowError as error:
        raise ValueError(f"a number does not fit into 64 bits: {error}") from error

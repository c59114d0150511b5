"""Policy classes: the queues of a router, what a request must be to wait in one, and the limits of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from dynamo.placement.queueing.order import QueueOrder

DEFAULT_CLASS: Final = "default"
UNKNOWN_BATCH_TOKENS: Final = 10_000_000  # of a worker that has not reported how many tokens it takes in one step
TENANT_QUANTUM: Final = 16_384  # above most prompts, or a turn ends before its cached prefix is used again
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class InvalidPolicy(ValueError):
    """A policy profile cannot be used; the message begins with the path of the key."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = path, problem


class RankPrefill(msgspec.Struct, frozen=True, gc=False):
    """The facts of one rank that decide about parking."""

    active_prefill_tokens: float
    max_num_batched_tokens: int | None = None


class UncachedIslBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts with at least `min_tokens` uncached tokens, up to the next bucket's floor."""

    min_tokens: int
    bucket: str


class PolicyClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One queue. With a family and a bucket it is found through these; without them only by its name."""

    name: str
    quantum: int
    """Uncached tokens that one turn of the class brings."""
    policy_family: str | None = None
    cache_bucket: str | None = None
    queue_policy: QueueOrder = QueueOrder.FCFS
    prefill_busy_threshold: int | None = None
    """A rank with more prefill tokens than this is busy for the class."""
    prefill_busy_threshold_frac: float | None = None
    """The same as a part of the tokens that the rank takes in one step."""
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None
    slo_ttft_ms: int | None = None
    """When the first token should be there, of a request that names no target itself."""
    tenant_quantum: int = TENANT_QUANTUM
    """With `dlpm`: the uncached tokens that one turn of a tenant brings, for each worker."""

    @property
    def is_explicit(self) -> bool:
        """Whether requests get into this class by its name alone."""
        return self.policy_family is None

    @property
    def parks(self) -> bool:
        """Whether a request of this class can ever wait for a worker."""
        return self.prefill_busy_threshold is not None or self.prefill_busy_threshold_frac is not None

    def is_busy(self, rank: RankPrefill) -> bool:
        """Return whether a rank is too busy for a request of this class."""
        return self.is_over(rank.active_prefill_tokens, rank.max_num_batched_tokens)

    def is_over(self, active_prefill_tokens: float, max_num_batched_tokens: int | None) -> bool:
        """Return whether a rank with so many prefill tokens is too busy for a request of this class."""
        if self.prefill_busy_threshold is not None and active_prefill_tokens > self.prefill_busy_threshold:
            return True
        part = self.prefill_busy_threshold_frac
        return part is not None and active_prefill_tokens > part * (max_num_batched_tokens or UNKNOWN_BATCH_TOKENS)

    def check(self, path: str) -> None:
        """Raise InvalidPolicy for a value that cannot be meant."""
        check_name(self.name, f"{path}.name")
        if (self.policy_family is None) != (self.cache_bucket is None):
            raise InvalidPolicy(path, "policy_family and cache_bucket are given together or not at all")
        if self.policy_family is not None:
            check_name(self.policy_family, f"{path}.policy_family")
        if self.queue_policy is QueueOrder.LCFS:
            raise InvalidPolicy(f"{path}.queue_policy", "must be fcfs, wspt or dlpm")
        for name in ("quantum", "tenant_quantum", "slo_ttft_ms"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**63:
                raise InvalidPolicy(f"{path}.{name}", f"must be at least 1, got {value}")
        for name in (
            "prefill_busy_threshold",
            "prefill_busy_threshold_frac",
            "request_queue_limit_per_worker",
            "raw_isl_token_queue_limit_per_worker",
            "cached_token_queue_limit_per_worker",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:  # false for a NaN, too
                raise InvalidPolicy(f"{path}.{name}", f"must be a number of at least 0, got {value}")


class PolicyProfile:
    """The classes of one model, and the choice among them. Immutable once made."""

    __slots__ = ("_bucketed", "_buckets", "_default_family", "classes")

    def __init__(
        self,
        classes: tuple[PolicyClass, ...],
        buckets: tuple[UncachedIslBucket, ...] = (),
        default_family: str | None = None,
        *,
        path: str = "",
    ) -> None:
        """Raise InvalidPolicy for a profile that leaves a request without a class. `path`: what stands before the keys
        that errors name, such as "models.m.".
        """
        if not classes:
            raise InvalidPolicy(f"{path}policy_classes", "at least one class is needed")
        for number, each in enumerate(classes):
            each.check(f"{path}policy_classes[{number}]")
        self.classes: Mapping[str, PolicyClass] = MappingProxyType({each.name: each for each in classes})
        if len(self.classes) != len(classes):
            raise InvalidPolicy(f"{path}policy_classes", "each name may be given once")
        _check_buckets(buckets, f"{path}uncached_isl_buckets")
        self._buckets = buckets
        self._bucketed = _by_family(classes, buckets, path)
        if default_family not in self._bucketed:
            raise InvalidPolicy(
                f"{path}default_policy_family",
                f"must be one of {', '.join(sorted(self._bucketed)) or 'the families, but no class has one'}, "
                f"got {default_family!r}",
            )
        self._default_family = default_family

    @classmethod
    def of_one_class(cls, *, queue_threshold: float | None, order: QueueOrder = QueueOrder.FCFS) -> PolicyProfile:
        """Make the profile of a router without a policy file: one class, which parks above `queue_threshold`, a part of
        the tokens that a worker takes in one step. None: nothing is ever parked.
        """
        if queue_threshold is not None:
            _check_threshold(queue_threshold)
        made = cls.__new__(cls)  # `lcfs`, which no file may name, is allowed here
        only = PolicyClass(
            name=DEFAULT_CLASS,
            quantum=1,  # there is no other class to share with
            policy_family=DEFAULT_CLASS,
            cache_bucket=DEFAULT_CLASS,
            queue_policy=order,
            prefill_busy_threshold_frac=queue_threshold,
        )
        made.classes = MappingProxyType({DEFAULT_CLASS: only})
        made._buckets = (UncachedIslBucket(0, DEFAULT_CLASS),)
        made._bucketed = {DEFAULT_CLASS: {DEFAULT_CLASS: only}}
        made._default_family = DEFAULT_CLASS
        return made

    def with_threshold(self, queue_threshold: float) -> PolicyProfile:
        """Return the profile in which classes without a threshold of their own have this one."""
        _check_threshold(queue_threshold)
        made = PolicyProfile.__new__(PolicyProfile)
        made.classes = MappingProxyType(
            {
                name: each if each.parks else msgspec.structs.replace(each, prefill_busy_threshold_frac=queue_threshold)
                for name, each in self.classes.items()
            }
        )
        made._buckets, made._default_family = self._buckets, self._default_family
        made._bucketed = {
            family: {bucket: made.classes[each.name] for bucket, each in found.items()}
            for family, found in self._bucketed.items()
        }
        return made

    @property
    def parks(self) -> bool:
        """Whether any class can ever keep a request waiting."""
        return any(each.parks for each in self.classes.values())

    def resolve(self, asked: str | None, uncached_tokens: int) -> PolicyClass:
        """Return the class of a request.

        `asked` holds what the request names: the name of an explicit class, or a family. Any other word, also the name of a
        class that belongs to a family, counts as none. Within a family the uncached tokens decide.
        """
        if asked is not None and (found := self.classes.get(asked)) is not None and found.is_explicit:
            return found
        family = asked if asked in self._bucketed else self._default_family
        assert family is not None
        bucket = self._buckets[0].bucket
        for each in self._buckets:
            if uncached_tokens < each.min_tokens:
                break
            bucket = each.bucket
        return self._bucketed[family][bucket]


def check_name(name: str, path: str) -> None:
    """Raise InvalidPolicy for a name that could not stand in a metric's label."""
    if not _NAME.fullmatch(name):
        raise InvalidPolicy(path, f"a name has letters, digits, '_', '.' and '-', got {name!r}")


def _check_threshold(queue_threshold: float) -> None:
    if not 0 <= queue_threshold < 2**63:
        raise InvalidPolicy("queue_threshold", f"must be a number of at least 0, got {queue_threshold}")


def _check_buckets(buckets: tuple[UncachedIslBucket, ...], path: str) -> None:
    if not buckets:
        raise InvalidPolicy(path, "at least one bucket is needed")
    if buckets[0].min_tokens != 0:
        raise InvalidPolicy(f"{path}[0].min_tokens", f"the first floor is 0, got {buckets[0].min_tokens}")
    for number, each in enumerate(buckets):
        check_name(each.bucket, f"{path}[{number}].bucket")
        if number and each.min_tokens <= buckets[number - 1].min_tokens:
            raise InvalidPolicy(f"{path}[{number}].min_tokens", "each floor must be above the one before")
    if len({each.bucket for each in buckets}) != len(buckets):
        raise InvalidPolicy(path, "each bucket may be named once")


def _by_family(
    classes: tuple[PolicyClass, ...], buckets: tuple[UncachedIslBucket, ...], path: str
) -> dict[str, dict[str, PolicyClass]]:
    """Return the classes by family and bucket. Raises InvalidPolicy unless each family has one class for each bucket."""
    known = {each.bucket for each in buckets}
    found: dict[str, dict[str, PolicyClass]] = {}
    for number, each in enumerate(classes):
        if each.policy_family is None or each.cache_bucket is None:
            continue
        where = f"{path}policy_classes[{number}]"
        if each.cache_bucket not in known:
            raise InvalidPolicy(f"{where}.cache_bucket", f"no bucket is called {each.cache_bucket!r}")
        family = found.setdefault(each.policy_family, {})
        if each.cache_bucket in family:
            raise InvalidPolicy(
                where, f"family {each.policy_family!r} has a class for bucket {each.cache_bucket!r} already"
            )
        family[each.cache_bucket] = each
    for name, family in found.items():
        if missing := known - family.keys():
            raise InvalidPolicy(
                f"{path}policy_classes", f"family {name!r} has no class for bucket {', '.join(sorted(missing))}"
            )
        if (same := next((c for c in classes if c.is_explicit and c.name == name), None)) is not None:
            raise InvalidPolicy(f"{path}policy_classes", f"{same.name!r} is a family and an explicit class")
    return found

"""The settings of KV-aware routing: for a router that places by cached prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import msgspec

from dynamo.kv.approximate_index import DEFAULT_TTL_SECONDS
from dynamo.placement.kv_query import MAX_WEIGHT
from dynamo.placement.policies.kv_default import DefaultCostParameters
from dynamo.placement.policies.kv_policies import is_of_user
from dynamo.placement.queueing import PolicyFile, PolicyProfile, QueueOrder, Selector, read_policy_file
from dynamo.placement.queueing.policy_file import SelectorRole
from dynamo.placement.session_affinity import MAX_TTL_SECONDS, MIN_TTL_SECONDS
from dynamo.settings.readers import (
    SettingReader,
    integer,
    mebibytes,
    number,
    off_at_zero,
    one_of,
    seconds,
    switch,
    text,
)
from dynamo.settings.table import setting

KV_POLICIES: Final = ("time", "default", "two-tier")
MIB: Final = 1024 * 1024

_GROUP: Final = "kv router"
_COST: Final = DefaultCostParameters()
_NO_FILE: Final = PolicyFile()
_ROLES: Final[Mapping[str, SelectorRole]] = {
    "aggregated": "aggregated", "prefill": "prefill", "decode": "decode", "encode": "encode",
}  # fmt: skip
# Settings of a policy file that have one value here, and the bounds of those that are numbers.
_ONE_VALUE: Final[Mapping[str, object]] = {
    "router_tracking_hash": "public-xxh3-v1", "router_tracking_key_file": None, "router_tracking_key_id": None,
    "router_prefill_load_model": "none", "use_remote_indexer": False, "serve_indexer": False,
    "shared_cache_type": "none", "enable_session_prefix_index": False,
}  # fmt: skip
_AT_LEAST: Final = {
    "host_cache_hit_weight": (0, 1), "disk_cache_hit_weight": (0, 1), "router_ttl_secs": (0.1, 2**53),
    "router_predicted_ttl_secs": (0, 2**53),
}  # fmt: skip
_weight: Final = number(0, MAX_WEIGHT, metavar="WEIGHT")
_part: Final = number(0, 1, metavar="PART")
_off_at_zero: Final = off_at_zero(seconds())


def policy_name(*known: str) -> SettingReader[str]:
    """Make the reader of a policy: one of `known`, or where a class of the user is. It raises ValueError for anything else."""
    of_known = one_of(*known)
    return SettingReader(lambda given: given if is_of_user(given) else of_known.parse(given), metavar="POLICY")


_POLICY: Final = policy_name(*KV_POLICIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRouterSettings:
    """What `--router-mode kv` goes by. The names of the fields are those of the native `KvRouterConfig` where it has them."""

    # fmt: off
    policy: str = setting("time", "DYN_ROUTER_POLICY", _POLICY,
        "What `--router-mode kv` decides by: `time` (what a placement costs in milliseconds), `default` (the cost function "
        "of the native router), `two-tier` (the longest prefix while the workers are in balance, else the least loaded), or a "
        "class of your own, `FILE.py:CLASS` ([policies](policies.md))", flag="--router-policy", group=_GROUP)
    shadow_policy: str | None = setting(None, "DYN_ROUTER_SHADOW_POLICY", _POLICY,
        "Let this policy decide, too, without effect: metrics and `dynamo explain` show both",
        flag="--shadow-policy", group=_GROUP)
    kv_cache_block_size: int | None = setting(None, "DYN_KV_CACHE_BLOCK_SIZE", integer(1),
        "Tokens of a KV block; unset: as on the model's card", flag="--kv-cache-block-size", group=_GROUP)
    overlap_score_credit: float = setting(_COST.overlap_score_credit, "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", _weight,
        "What a cached block counts against a block that is to be computed; 0: caches are not looked at",
        flag="--router-kv-overlap-score-credit", group=_GROUP)
    overlap_score_credit_decay: float = setting(_COST.overlap_score_credit_decay, "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY", _weight,
        "How much the credit falls with the prompt tokens that wait at a worker (`default`)",
        flag="--router-kv-overlap-score-credit-decay", group=_GROUP)
    prefill_load_scale: float = setting(_COST.prefill_load_scale, "DYN_ROUTER_PREFILL_LOAD_SCALE", _weight,
        "What a block that is to be computed counts against a block of a running answer (`default`)",
        flag="--router-prefill-load-scale", group=_GROUP)
    decode_active_request_weight: float = setting(_COST.decode_active_request_weight, "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", _weight,
        "What a request that runs at a worker counts, in blocks (`default`)",
        flag="--router-decode-active-request-weight", group=_GROUP)
    host_cache_hit_weight: float = setting(_COST.host_cache_hit_weight, "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", _part,
        "What a block in the memory of the host counts against a block on the device",
        flag="--router-host-cache-hit-weight", group=_GROUP)
    disk_cache_hit_weight: float = setting(_COST.disk_cache_hit_weight, "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", _part,
        "The same for a block on a disk or in a shared store", flag="--router-disk-cache-hit-weight", group=_GROUP)
    router_temperature: float = setting(_COST.router_temperature, "DYN_ROUTER_TEMPERATURE", _weight,
        "0: the worker with the lowest cost. More: a worker by chance, the more evenly the higher it is",
        flag="--router-temperature", group=_GROUP)
    use_kv_events: bool = setting(True, "DYN_ROUTER_USE_KV_EVENTS", switch,
        "Learn from the workers' KV events what they hold. Off: guess it from where prompts went",
        flag=("--router-kv-events", "--kv-events"), group=_GROUP)
    router_ttl_secs: float = setting(DEFAULT_TTL_SECONDS, "DYN_ROUTER_TTL_SECS", seconds(0.1),
        "How long such a guess holds", flag="--router-ttl-secs", group=_GROUP)
    router_approximate_cache_policy: str = setting("ttl", "DYN_ROUTER_APPROXIMATE_CACHE_POLICY", one_of("ttl", "lru"),
        "What ends a guess: its age (`ttl`), or newer ones once they fill the worker's cache (`lru`)",
        flag="--router-approximate-cache-policy", group=_GROUP)
    router_predicted_ttl_secs: float | None = setting(None, "DYN_ROUTER_PREDICTED_TTL_SECS", _off_at_zero,
        "With KV events: count a prompt's blocks as held by its worker for so long, until its events arrive. "
        "Unset or 0: not at all, as `time` knows by itself what is on its way",
        flag="--router-predicted-ttl-secs", group=_GROUP)
    router_assume_kv_reuse: bool = setting(True, "DYN_ROUTER_ASSUME_KV_REUSE", switch,
        "Requests with a common prefix share its blocks at a worker. Off: each is counted as if alone",
        flag=("--router-assume-kv-reuse", "--assume-kv-reuse"), group=_GROUP)
    router_track_active_blocks: bool = setting(True, "DYN_ROUTER_TRACK_ACTIVE_BLOCKS", switch,
        "Count the blocks of running requests as load",
        flag=("--router-track-active-blocks", "--track-active-blocks"), group=_GROUP)
    router_track_output_blocks: bool = setting(False, "DYN_ROUTER_TRACK_OUTPUT_BLOCKS", switch,
        "Also count the blocks that their answers fill",
        flag=("--router-track-output-blocks", "--track-output-blocks"), group=_GROUP)
    router_track_prefill_tokens: bool = setting(True, "DYN_ROUTER_TRACK_PREFILL_TOKENS", switch,
        "Count the prompt tokens that are still to be computed as load",
        flag="--router-track-prefill-tokens", group=_GROUP)
    router_replica_sync: bool | None = setting(None, "DYN_ROUTER_REPLICA_SYNC", switch,
        "Report what this router books to the other routers of its workers, and count what they book "
        "([routing](routing.md#several-routers))",
        flag="--router-replica-sync", group=_GROUP, shown="on among several processes of one frontend, else off")
    router_queue_threshold: float | None = setting(None, "DYN_ROUTER_QUEUE_THRESHOLD", number(0, metavar="PART"),
        "Let a request wait while every worker that could serve it has more prompt tokens to compute than this part of "
        "`max_num_batched_tokens` ([queues](routing.md#queues)). Also for the classes of `--router-policy-config` that "
        "have no threshold of their own", flag="--router-queue-threshold", group=_GROUP)
    router_queue_policy: str = setting("fcfs", "DYN_ROUTER_QUEUE_POLICY", one_of("fcfs", "wspt", "dlpm"),
        "Which request goes first where no policy class decides: the request that came first (`fcfs`), the one with the fewest "
        "tokens to compute (`wspt`), or tenants in turn, each with its longest cached prefixes (`dlpm`)", flag="--router-queue-policy", group=_GROUP)
    router_policy_config: str | None = setting(None, "DYN_ROUTER_POLICY_CONFIG", SettingReader(str, metavar="FILE"),
        "YAML with policy classes, policies by role, and router settings ([queues](routing.md#queues)); what it gives "
        "beats flags and variables", flag="--router-policy-config", group=_GROUP)
    router_session_affinity_ttl_secs: float | None = setting(None, "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        seconds(MIN_TTL_SECONDS),
        "Requests of a session (`x-dynamo-session-id`) go to one worker until the session has been idle for so long, up to a "
        "year ([sessions](routing.md#sessions))", flag="--router-session-affinity-ttl-secs", group=_GROUP)
    router_session_affinity_mode: str = setting("hard", "DYN_ROUTER_SESSION_AFFINITY_MODE", one_of("hard", "soft"),
        "`hard`: a session waits for its worker where requests wait. `soft`: it moves to another one instead",
        flag="--router-session-affinity-mode", group=_GROUP)
    worker_selection_policy: str | None = setting(None, "DYN_ROUTER_WORKER_SELECTION_POLICY", text,
        "A policy by name, from `worker_selection` of that file or one of `--router-policy`, for all roles")
    router_prefill_policy: str | None = setting(None, "DYN_ROUTER_PREFILL_POLICY", text,
        "The same for workers that only compute prompts", flag="--router-prefill-policy", group=_GROUP)
    router_decode_policy: str | None = setting(None, "DYN_ROUTER_DECODE_POLICY", text,
        "The same for workers that only decode", flag="--router-decode-policy", group=_GROUP)
    load_aware: bool = setting(False, "DYN_ROUTER_LOAD_AWARE", switch,
        "Route by the load alone: `--router-mode kv` without a look at caches, and without KV events",
        flag="--load-aware", group=_GROUP)
    active_request_expiry_seconds: float = setting(300.0, "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS", seconds(1),
        "A request that was booked by another router counts no longer than this")
    decisions_path: str | None = setting(None, "DYN_ROUTER_DECISIONS", SettingReader(str, metavar="FILE"),
        "Append every decision to this file, one JSON object on a line, for `dynamo explain`",
        flag="--router-decisions", group=_GROUP)
    decisions_limit_bytes: int = setting(64 * MIB, "DYN_ROUTER_DECISIONS_MB", mebibytes,
        "Size at which that file becomes `FILE.1` and a new one begins; two are kept")
    # fmt: on
    policies: PolicyFile = _NO_FILE  # of `router_policy_config`

    def settle(self, env: Mapping[str, str]) -> Self:
        """Read the policy file, apply `load_aware`, and check what more than one setting decides. Raises ValueError."""
        made = self if self.router_policy_config is None else self._with_file(self.router_policy_config)
        return made._settled()

    def _with_file(self, path: str) -> Self:
        """Return the settings over those of a policy file. Raises ValueError."""
        try:
            with open(path, encoding="utf-8") as file:
                policies = read_policy_file(file.read())
        except OSError as error:
            raise ValueError(f"--router-policy-config {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"--router-policy-config {path}: {error}") from error
        given = {name: it for name, it in msgspec.structs.asdict(policies.router).items() if it is not None}
        for name in given.keys() & _ONE_VALUE.keys():
            if given.pop(name) != _ONE_VALUE[name]:
                raise ValueError(f"--router-policy-config {path}: router.{name}: {_ONE_VALUE[name]!r} is the only one")
        given.pop("router_event_threads", None)  # there is one thread
        for name in given.keys() & _AT_LEAST.keys():
            least, most = _AT_LEAST[name]
            if not least <= given[name] <= most:
                raise ValueError(f"--router-policy-config {path}: router.{name} must be between {least} and {most:g}")
        policy = given.get("router_approximate_cache_policy", "ttl")
        if policy not in ("ttl", "lru"):
            raise ValueError(f"--router-policy-config {path}: router.router_approximate_cache_policy: ttl or lru")
        return replace(self, policies=policies, **given)

    def _settled(self) -> Self:
        ttl = self.router_session_affinity_ttl_secs
        if ttl is not None and ttl > MAX_TTL_SECONDS:
            raise ValueError(f"--router-session-affinity-ttl-secs must be at most {MAX_TTL_SECONDS}, got {ttl:g}")
        if self.load_aware:
            return replace(
                self,
                overlap_score_credit=0.0,
                use_kv_events=False,
                router_predicted_ttl_secs=None,
                router_assume_kv_reuse=False,
                router_track_active_blocks=True,
                router_track_prefill_tokens=True,
            )
        if self.router_predicted_ttl_secs is not None and not self.use_kv_events:
            raise ValueError(
                "--router-predicted-ttl-secs adds to KV events: it has no meaning with --no-router-kv-events"
            )
        if self.router_approximate_cache_policy == "lru" and self.use_kv_events:
            raise ValueError("--router-approximate-cache-policy lru needs --no-router-kv-events")
        return self

    def profile(self, model: str) -> PolicyProfile:
        """Return the policy classes of a model."""
        found = self.policies.profile(model)
        if found is not None:
            return found if self.router_queue_threshold is None else found.with_threshold(self.router_queue_threshold)
        order = QueueOrder(self.router_queue_policy)
        return PolicyProfile.of_one_class(queue_threshold=self.router_queue_threshold, order=order)

    def selector(self, role: str) -> Selector | None:
        """Return how workers of a role are chosen; None: by `policy`. Raises ValueError for a name that nothing has."""
        flag = {"prefill": self.router_prefill_policy, "decode": self.router_decode_policy}.get(role)
        name = flag or self.worker_selection_policy
        if name is None:
            return self.policies.selector(_ROLES[role]) if role in _ROLES else None
        found = self.policies.named_selector(name)
        if found is None and name not in KV_POLICIES and not is_of_user(name):
            known = ", ".join([*self.policies.selector_names, *KV_POLICIES])
            raise ValueError(f"no worker selection policy is called {name!r}; known: {known}")
        return found or Selector(name, name)

    @property
    def reads_events(self) -> bool:
        """Whether the KV events of workers are followed."""
        return self.use_kv_events and self.overlap_score_credit > 0

    @property
    def guesses(self) -> bool:
        """Whether what workers hold is guessed from where prompts went."""
        return not self.use_kv_events and self.overlap_score_credit > 0

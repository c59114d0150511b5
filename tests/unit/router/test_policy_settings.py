"""The settings of the queues, and what a policy file changes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.placement.policies.kv_default import DefaultCost
from dynamo.placement.policies.kv_two_tier import TwoTierCost
from dynamo.router.kv.domains import policy_of
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.settings.table import read_settings
from support.cases import each_case

CLASSES = """
default_policy_family: f
uncached_isl_buckets: [{min_tokens: 0, bucket: b}]
policy_classes:
  - {name: all, policy_family: f, cache_bucket: b, quantum: 5}
  - {name: own, quantum: 1, prefill_busy_threshold: 7}
"""


def read(tmp_path: Path, text: str, **env: str) -> KvRouterSettings:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return read_settings(KvRouterSettings, {"DYN_ROUTER_POLICY_CONFIG": str(path), **env})


def test_without_a_threshold_no_request_ever_waits() -> None:
    assert not KvRouterSettings().profile("m").parks
    made = read_settings(KvRouterSettings, {"DYN_ROUTER_QUEUE_THRESHOLD": "2", "DYN_ROUTER_QUEUE_POLICY": "wspt"})
    (only,) = made.profile("m").classes.values()
    assert (only.prefill_busy_threshold_frac, only.queue_policy) == (2, "wspt")


def test_a_class_without_a_threshold_has_that_of_the_router(tmp_path: Path) -> None:
    assert [each.parks for each in read(tmp_path, CLASSES).profile("m").classes.values()] == [False, True]
    profile = read(tmp_path, CLASSES, DYN_ROUTER_QUEUE_THRESHOLD="0.5").profile("m")
    assert profile.classes["all"].prefill_busy_threshold_frac == 0.5
    assert profile.classes["own"].prefill_busy_threshold_frac is None
    assert profile.resolve("anything", 10) is profile.classes["all"]
    assert profile.resolve("own", 10) is profile.classes["own"]


def test_router_settings_of_the_file_hold_over_variables(tmp_path: Path) -> None:
    text = (
        "router: {host_cache_hit_weight: 0.5, router_replica_sync: true, router_event_threads: 8, use_kv_events: false}"
    )
    made = read(tmp_path, text, DYN_ROUTER_HOST_CACHE_HIT_WEIGHT="0.25", DYN_ROUTER_DISK_CACHE_HIT_WEIGHT="0.125")
    assert (made.host_cache_hit_weight, made.disk_cache_hit_weight) == (0.5, 0.125)
    assert (made.router_replica_sync, made.reads_events) == (True, False)


@each_case(
    "text, words",
    [
        ("nothing: 1", "nothing"),
        ("router: {use_remote_indexer: true}", "router.use_remote_indexer"),
        ("router: {shared_cache_type: hicache}", "router.shared_cache_type"),
        ("router: {router_prefill_load_model: ais}", "router.router_prefill_load_model"),
        ("router: {router_tracking_hash: keyed-xxh3-v1}", "router.router_tracking_hash"),
        ("router: {host_cache_hit_weight: 2}", "router.host_cache_hit_weight"),
        ("router: {router_ttl_secs: 0}", "router.router_ttl_secs"),
        ("router: {router_approximate_cache_policy: mru}", "router.router_approximate_cache_policy"),
        ("request_classifier: {type: thunderagent}", "request_classifier"),
        ("worker_selection: {prefill: none}", "worker_selection.prefill"),
    ],
)
def test_what_a_file_cannot_mean_ends_the_start_with_its_path(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read(tmp_path, text)


def test_a_file_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(ValueError, match=r"/nowhere/policy.yaml: No such file"):
        read_settings(KvRouterSettings, {"DYN_ROUTER_POLICY_CONFIG": "/nowhere/policy.yaml"})


def test_each_role_has_the_policy_that_flag_variable_or_file_names(tmp_path: Path) -> None:
    text = """
    worker_selection:
      prefill: mine
      instances:
        - {name: mine, type: dynamo-default-cost-fn, parameters: {prefill_load_scale: 3.0}}
        - {name: tiers, type: dynamo-two-tier-cost-fn, parameters: {}}
    """
    made = read(tmp_path, text)
    prefill, header = policy_of(made, "prefill")
    assert isinstance(prefill, DefaultCost)
    assert header.parameters == {"prefill_load_scale": 3.0}
    assert type(policy_of(made, "decode")[0]) is type(policy_of(KvRouterSettings())[0])
    by_variable = read(tmp_path, text, DYN_ROUTER_WORKER_SELECTION_POLICY="tiers")
    assert isinstance(policy_of(by_variable, "prefill")[0], TwoTierCost)
    by_flag = read(tmp_path, text, DYN_ROUTER_PREFILL_POLICY="default")
    assert isinstance(policy_of(by_flag, "prefill")[0], DefaultCost)
    with pytest.raises(InvalidArgument, match="no worker selection policy is called 'who'; known: mine, tiers, time"):
        policy_of(read(tmp_path, text, DYN_ROUTER_DECODE_POLICY="who"), "decode")

"""The file of `--router-policy-config`: what it means, and what each mistake is called."""

from __future__ import annotations

import pytest

from dynamo.placement.queueing import InvalidPolicy, PolicyProfile, QueueOrder, read_policy_file

ROOT = """
default_policy_family: chat
uncached_isl_buckets:
  - {min_tokens: 0, bucket: short}
  - {min_tokens: 100, bucket: long}
policy_classes:
  - {name: chat-short, policy_family: chat, cache_bucket: short, quantum: 4000}
  - {name: chat-long, policy_family: chat, cache_bucket: long, quantum: 1000, queue_policy: wspt,
     prefill_busy_threshold: 5, prefill_busy_threshold_frac: 0.5, request_queue_limit_per_worker: 1,
     raw_isl_token_queue_limit_per_worker: 2, cached_token_queue_limit_per_worker: 3}
  - {name: batch-short, policy_family: batch, cache_bucket: short, quantum: 1}
  - {name: batch-long, policy_family: batch, cache_bucket: long, quantum: 1}
  - {name: vip, quantum: 9}
"""


def test_a_class_is_found_by_its_name_its_family_or_the_default_and_by_the_uncached_tokens() -> None:
    profile = read_policy_file(ROOT).profile("any")
    assert profile is not None
    for asked, uncached, name in [
        ("vip", 0, "vip"),
        ("vip", 10**6, "vip"),
        ("batch", 99, "batch-short"),
        ("batch", 100, "batch-long"),
        ("batch-long", 0, "chat-short"),  # the class of a family has no name that requests could use
        ("unknown", 500, "chat-long"),
        (None, 0, "chat-short"),
    ]:
        assert profile.resolve(asked, uncached).name == name
    long = profile.classes["chat-long"]
    assert (long.queue_policy, long.prefill_busy_threshold_frac) == (QueueOrder.WSPT, 0.5)
    assert (long.request_queue_limit_per_worker, long.cached_token_queue_limit_per_worker) == (1, 3)


def test_a_model_has_its_own_profile_or_the_roots_and_inherits_nothing() -> None:
    own = """
models:
  m:
    default_policy_family: f
    uncached_isl_buckets: [{min_tokens: 0, bucket: b}]
    policy_classes: [{name: only, policy_family: f, cache_bucket: b, quantum: 1}]
"""
    both = read_policy_file(ROOT + own)
    mine, other = both.profile("m"), both.profile("m2")
    assert mine is not None
    assert other is not None
    assert (set(mine.classes), len(other.classes)) == ({"only"}, 5)
    assert mine.resolve("vip", 0).name == "only"
    assert read_policy_file(own).profile("m2") is None


def test_a_class_has_a_target_for_first_tokens_and_a_quantum_for_its_tenants() -> None:
    text = """
default_policy_family: f
uncached_isl_buckets: [{min_tokens: 0, bucket: b}]
policy_classes: [{name: only, policy_family: f, cache_bucket: b, quantum: 1, queue_policy: dlpm, tenant_quantum: 9, slo_ttft_ms: 300}]
"""
    profile = read_policy_file(text).profile("m")
    assert profile is not None
    only = profile.with_threshold(0.5).classes["only"]
    assert (only.queue_policy, only.tenant_quantum, only.slo_ttft_ms) == (QueueOrder.DLPM, 9, 300)


def test_without_a_file_there_is_one_class_called_default() -> None:
    profile = PolicyProfile.of_one_class(queue_threshold=1.5, order=QueueOrder.WSPT)
    found = profile.resolve("vip", 10**6)
    assert (found.name, found.prefill_busy_threshold_frac, found.queue_policy) == ("default", 1.5, QueueOrder.WSPT)
    assert not PolicyProfile.of_one_class(queue_threshold=None).resolve(None, 0).parks
    with pytest.raises(InvalidPolicy, match="queue_threshold"):
        PolicyProfile.of_one_class(queue_threshold=float("nan"))


def test_selectors_and_router_settings() -> None:
    file = read_policy_file(
        "worker_selection: {aggregated: default, prefill: mine, "
        "instances: [{name: mine, type: dynamo-two-tier-cost-fn, parameters: {cache_threshold: 0.5}}]}\n"
        "router: {router_ttl_secs: 5, use_kv_events: false}\n"
    )
    assert file.selector("aggregated") is None
    assert file.selector("decode") is None
    mine = file.selector("prefill")
    assert mine is not None
    assert (mine.type, mine.parameters) == ("dynamo-two-tier-cost-fn", {"cache_threshold": 0.5})
    assert (file.router.router_ttl_secs, file.router.use_kv_events, file.router.serve_indexer) == (5.0, False, None)
    assert file.profile("m") is None


def test_json_is_read_too() -> None:
    assert read_policy_file('{"router": {"router_event_threads": 2}}').router.router_event_threads == 2


def test_every_mistake_names_its_key() -> None:
    def root(old: str = "", new: str = "", more: str = "") -> str:
        assert old in ROOT
        return ROOT.replace(old, new, 1) + more

    short = "cache_bucket: short, quantum: 4000"
    mistakes = [
        ("", "policy file", "gives none"),
        ("models: {}", "policy file", "gives none"),
        ("- a", "policy file", "must be a map"),
        ("a: [", "policy file", "not valid YAML"),
        (root(more="foo: 1"), "policy file", "unknown key 'foo'"),
        (root(more="vip: 1\nvip: 2"), "vip", "given twice"),
        (root(short, f"{short}, quantum: 1"), "policy_classes[0].quantum", "given twice"),
        (root(short, f"{short}, foo: 1"), "policy_classes[0]", "unknown key 'foo'"),
        (root(short, "cache_bucket: short"), "policy_classes[0]", "missing required field `quantum`"),
        (root(short, "cache_bucket: short, quantum: 0"), "policy_classes[0].quantum", "at least 1"),
        (root(short, "cache_bucket: short, quantum: '5'"), "policy_classes[0].quantum", "expected `int`"),
        (root("queue_policy: wspt", "queue_policy: lcfs"), "policy_classes[1].queue_policy", "fcfs, wspt or dlpm"),
        (root("queue_policy: wspt", "queue_policy: FCFS"), "policy_classes[1].queue_policy", "FCFS"),
        (root("frac: 0.5", "frac: -0.5"), "policy_classes[1].prefill_busy_threshold_frac", "at least 0"),
        (root("frac: 0.5", "frac: .inf"), "policy_classes[1].prefill_busy_threshold_frac", "at least 0"),
        (root("frac: 0.5", "frac: .nan"), "policy_classes[1].prefill_busy_threshold_frac", "at least 0"),
        (root("threshold: 5", "threshold: 0.5"), "policy_classes[1].prefill_busy_threshold", "expected `int"),
        (root("name: chat-short", "name: chat short"), "policy_classes[0].name", "a name has letters"),
        (root("min_tokens: 0", "min_tokens: 1"), "uncached_isl_buckets[0].min_tokens", "the first floor is 0"),
        (root("min_tokens: 100", "min_tokens: 0"), "uncached_isl_buckets[1].min_tokens", "above the one before"),
        (root("bucket: long}", "bucket: short}"), "uncached_isl_buckets", "named once"),
        (root("family: chat\n", "family: none\n"), "default_policy_family", "must be one of batch, chat"),
        (root("name: vip", "name: chat-long"), "policy_classes", "each name may be given once"),
        (root("name: vip", "name: chat"), "policy_classes", "is a family and an explicit class"),
        (root(", cache_bucket: short, quantum: 4000", ", quantum: 1"), "policy_classes[0]", "together or not at all"),
        (root("bucket: short, quantum: 4000", "bucket: huge, quantum: 1"), "policy_classes[0].cache_bucket", "huge"),
        (root("bucket: short, quantum: 4000", "bucket: long, quantum: 1"), "policy_classes[1]", "already"),
        (root("policy_family: batch", "policy_family: other"), "policy_classes", "has no class for bucket"),
        ("default_policy_family: a", "policy file", "all or not at all"),
        ("models: [a]", "models", "expected `object`"),
        ("models: {m: {foo: 1}}", "models.m", "unknown key 'foo'"),
        ("router: {foo: 1}", "router", "unknown key 'foo'"),
        ("router: {router_ttl_secs: x}", "router.router_ttl_secs", "expected `float"),
        ("request_classifier: {type: thunderagent}", "request_classifier", "not built"),
        ("worker_selection: {foo: 1}", "worker_selection", "unknown key 'foo'"),
        ("worker_selection: {decode: x}", "worker_selection.decode", "no instance is called 'x'"),
        ("worker_selection: {instances: [{name: default, type: a}]}", "worker_selection.instances[0].name", "built-in"),
        (
            "worker_selection: {instances: [{name: a, type: a}, {name: a, type: b}]}",
            "worker_selection.instances[1].name",
            "twice",
        ),
    ]
    for text, path, problem in mistakes:
        with pytest.raises(InvalidPolicy) as caught:
            read_policy_file(text)
        assert str(caught.value).startswith(f"{path}: "), (text, str(caught.value))
        assert problem in str(caught.value), (text, str(caught.value))


def test_a_mistake_in_a_models_profile_names_the_model() -> None:
    text = "models:\n  m:" + "".join(
        f"\n    {line}" for line in ROOT.replace("quantum: 4000", "quantum: 0").splitlines()
    )
    with pytest.raises(InvalidPolicy, match=r"^models\.m\.policy_classes\[0\]\.quantum: "):
        read_policy_file(text)


def test_a_file_that_unfolds_without_end_is_refused_at_once() -> None:
    doubled = "a0: &a0 {x: 1}\n" + "\n".join(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]" for at in range(1, 40))
    merged = "a0: &a0 {x: 1}\n" + "\n".join(f"a{at}: &a{at} {{<<: [*a{at - 1}, *a{at - 1}]}}" for at in range(1, 40))
    for text in (doubled, merged):
        with pytest.raises(InvalidPolicy, match="values"):
            read_policy_file(text)
    for text in ("router: &a [*a]", "router: " + "[" * 51 + "]" * 51):
        with pytest.raises(InvalidPolicy, match="has more than 50 levels"):
            read_policy_file(text)
    with pytest.raises(InvalidPolicy, match=r"levels|nesting depth"):  # newer YAML readers have a bound of their own
        read_policy_file("router: " + "[" * 5000 + "]" * 5000)


def test_a_value_that_its_tag_does_not_fit_is_refused() -> None:
    for text in ("router: !!int x", "router: 2001-99-99", "router: !!timestamp 99999"):
        with pytest.raises(InvalidPolicy, match="not valid YAML"):
            read_policy_file(text)

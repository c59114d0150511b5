"""Which decode workers the KV blocks of a prefill worker can be sent to."""

from __future__ import annotations

from dynamo.placement.kv_transfer import TransferRule, topology_taints, transfer_rule
from dynamo.protocol.records import ModelRuntimeConfig
from support.cases import each_case

PLACES = {"zone": "a", "rack": "r1"}
A = "dynamo.topology/zone=a"


@each_case(
    ("config", "rule"),
    [
        (ModelRuntimeConfig(), None),
        (ModelRuntimeConfig(topology_domains=PLACES), None),
        (ModelRuntimeConfig(topology_domains=PLACES, kv_transfer_domain="host"), None),
        (ModelRuntimeConfig(kv_transfer_domain="zone", kv_transfer_enforcement="required"), None),
        (ModelRuntimeConfig(topology_domains=PLACES, kv_transfer_domain="zone"), TransferRule(A, True)),
        (
            ModelRuntimeConfig(topology_domains=PLACES, kv_transfer_domain="zone", kv_transfer_enforcement="preferred"),
            TransferRule(A, False, 1.0),
        ),
        (
            ModelRuntimeConfig(
                topology_domains=PLACES,
                kv_transfer_domain="zone",
                kv_transfer_enforcement="preferred",
                kv_transfer_preferred_weight=0.0,
            ),
            TransferRule(A, False, 0.0),
        ),
    ],
)
def test_the_rule_is_made_of_the_place_and_the_domain_of_a_prefill_worker(
    config: ModelRuntimeConfig, rule: TransferRule | None
) -> None:
    assert transfer_rule(config) == rule


def test_every_place_is_a_taint() -> None:
    assert topology_taints(ModelRuntimeConfig(topology_domains=PLACES)) == {A, "dynamo.topology/rack=r1"}

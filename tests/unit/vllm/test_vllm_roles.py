"""What each half of a disaggregated request tells vLLM's connector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import InvalidArgument
from dynamo.vllm.roles import VllmRole, make_role
from support.cases import each_case

NIXL = SimpleNamespace(kv_connector="NixlConnector")
HELD = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 5}


def role(mode: DisaggregationMode) -> VllmRole:
    return make_role(mode, NIXL, has_adapters=True)


def test_a_prefill_asks_for_one_token_of_no_consequence_and_announces_a_peer() -> None:
    prefill = role(DisaggregationMode.PREFILL)
    transfer = prefill.transfer({"token_ids": [1]})
    assert transfer is not None
    assert (transfer["do_remote_decode"], transfer["do_remote_prefill"]) == (True, False)
    options = {
        "n": 1, "max_tokens": 40, "min_tokens": 3, "ignore_eos": False, "stop_token_ids": [2], "temperature": 0.5,
        "logprobs": 2, "prompt_logprobs": 1, "allowed_token_ids": [2],
    }  # fmt: skip
    prefill.adapt(options)
    assert options == {
        "n": 1, "max_tokens": 1, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": [], "temperature": 0.5,
    }  # fmt: skip
    assert not prefill.draws_tokens


def test_what_the_connector_answers_goes_to_the_decode_worker_as_it_is() -> None:
    handed_over = role(DisaggregationMode.PREFILL).handed_over(SimpleNamespace(kv_transfer_params=HELD))
    assert handed_over == {"kv_transfer_params": HELD}
    decode = role(DisaggregationMode.DECODE)
    assert decode.transfer({"prefill_result": {"disaggregated_params": handed_over}}) == HELD
    assert decode.handed_over(SimpleNamespace(kv_transfer_params=None)) is None


def test_a_connector_that_says_nothing_is_told_nothing() -> None:
    handed_over = role(DisaggregationMode.PREFILL).handed_over(SimpleNamespace())
    assert handed_over == {"kv_transfer_params": None}  # which is a result all the same
    assert role(DisaggregationMode.DECODE).transfer({"prefill_result": {"disaggregated_params": handed_over}}) is None


def test_a_canary_pins_no_block_and_needs_no_prefill() -> None:
    assert role(DisaggregationMode.PREFILL).transfer({"token_ids": [1], "_HEALTH_CHECK": True}) is None
    assert role(DisaggregationMode.DECODE).transfer({"token_ids": [1]}) is None


@each_case(
    "options, named",
    [({"n": 2}, "choices"), ({"n": 1, "prompt_logprobs": 0}, "log probabilities"), ({"n": 1}, None)],
)
def test_blocks_are_of_no_use_for_choices_and_for_log_probabilities_of_the_prompt(
    options: dict[str, Any], named: str | None
) -> None:
    found = role(DisaggregationMode.DECODE).unwanted(options)
    assert (found is None) if named is None else (found is not None and named in found)


@each_case(
    "mode, request_, named",
    [
        (DisaggregationMode.AGGREGATED, {"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        (DisaggregationMode.PREFILL, {"prefill_result": {"disaggregated_params": {}}}, "prefill_result"),
        (DisaggregationMode.DECODE, {"prefill_result": {}}, "disaggregated_params"),
        (
            DisaggregationMode.DECODE,
            {"prefill_result": {"disaggregated_params": {"kv_transfer_params": [1]}}},
            "kv_transfer_params",
        ),
    ],
)
def test_a_request_of_another_role_is_refused_by_its_field(
    mode: DisaggregationMode, request_: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        role(mode).transfer(request_)


def test_several_choices_cannot_be_handed_over() -> None:
    with pytest.raises(InvalidArgument, match=r"sampling_options\.n"):
        role(DisaggregationMode.PREFILL).adapt({"n": 2})


@each_case("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
def test_a_role_without_a_connector_is_refused_with_the_flag_to_add(mode: DisaggregationMode) -> None:
    with pytest.raises(InvalidArgument, match=r"--kv-transfer-config.*NixlConnector"):
        make_role(mode, None, has_adapters=False)


@each_case("name", ["ExampleConnector", "SharedStorageConnector"])
def test_a_connector_that_cannot_tell_adapters_apart_serves_none(name: str) -> None:
    with pytest.raises(InvalidArgument, match="--enable-lora"):
        make_role(DisaggregationMode.AGGREGATED, SimpleNamespace(kv_connector=name), has_adapters=True)

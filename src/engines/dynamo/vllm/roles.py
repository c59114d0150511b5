"""Prefill and decode on different workers: what vLLM's KV connector gets of each half of a request.

The blocks travel between the two connectors. The last output of a prefill names where its blocks are
(`kv_transfer_params`); that goes verbatim into the decode request. A connector that finds blocks by their tokens, such
as the example connector, names nothing and needs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from dynamo.contract.health_check import is_probe
from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.disaggregation import extract_prefill_result
from dynamo.errors import InvalidArgument

logger = logging.getLogger(__name__)

TRANSFER: Final = "kv_transfer_params"  # vLLM's name, in its sampling parameters and outputs
HANDED_OVER: Final = "disaggregated_params"
ROLES: Final = (DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE)

# What the connector gets with a prefill request: another engine will come for the blocks.
_FOR_ANOTHER: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The prefill's own token is thrown away: the decode worker draws it with all parameters of the request.
_DRAWN_ELSEWHERE: Final = ("logprobs", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "logit_bias")
_KEYED_BY_TOKENS_ONLY: Final = ("ExampleConnector", "SharedStorageConnector")


class VllmRole:
    """What a worker does of a request. This one does all of it."""

    draws_tokens = True
    """Whether the tokens of an answer are the client's, so that they keep to its grammar."""

    def transfer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what the connector gets of a request; None: nothing.

        Raises InvalidArgument for a request that is not for this role.
        """
        if request.get("prefill_result"):
            raise InvalidArgument("prefill_result is set, but this worker is not a decode worker")
        return None

    def adapt(self, options: dict[str, Any]) -> None:
        """Change the options of a request's sampling, in place, to what this role does. Raises InvalidArgument."""

    def unwanted(self, options: Mapping[str, Any]) -> str | None:
        """Return why blocks that a prefill worker holds cannot be used for a request; None: they can."""
        return None

    def handed_over(self, output: Any) -> dict[str, Any] | None:
        """Return what the last chunk has for the decode worker, as its `disaggregated_params`; None: nothing."""
        return None


class VllmPrefillRole(VllmRole):
    """Computes prompts, and keeps the blocks for a decode worker."""

    draws_tokens = False

    def transfer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        super().transfer(request)
        return None if is_probe(request) else dict(_FOR_ANOTHER)

    def adapt(self, options: dict[str, Any]) -> None:
        if options["n"] != 1:
            raise InvalidArgument("sampling_options.n must be 1 on a prefill worker: send one request for each choice")
        for name in _DRAWN_ELSEWHERE:
            options.pop(name, None)
        options |= {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True, "stop_token_ids": []}

    def handed_over(self, output: Any) -> dict[str, Any] | None:
        return {TRANSFER: getattr(output, TRANSFER, None)}


class VllmDecodeRole(VllmRole):
    """Fetches the blocks of a prompt and goes on; computes a prompt itself where no prefill worker has done so."""

    def transfer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        result = extract_prefill_result(request)
        if result is None:
            return None
        handed_over = result.get(HANDED_OVER)
        if not isinstance(handed_over, Mapping):
            raise InvalidArgument(f"prefill_result.{HANDED_OVER} must be an object, got {type(handed_over).__name__}")
        found = handed_over.get(TRANSFER)
        if found is None:
            return None
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise InvalidArgument(
                f"prefill_result.{HANDED_OVER}.{TRANSFER} must be an object, got {type(found).__name__}"
            )
        return dict(found)

    def unwanted(self, options: Mapping[str, Any]) -> str | None:
        if options["n"] > 1:
            return "its choices are made together"
        if options.get("prompt_logprobs") is not None:
            return "its log probabilities are wanted"
        return None


def make_role(mode: DisaggregationMode, transfer_config: Any, *, has_adapters: bool) -> VllmRole:
    """Return the role of a worker. `transfer_config`: vLLM's `KVTransferConfig` or None.

    Raises InvalidArgument for a role without a connector, or a connector that would mix adapters up.
    """
    connector = None if transfer_config is None else transfer_config.kv_connector
    if connector in _KEYED_BY_TOKENS_ONLY and has_adapters:
        raise InvalidArgument(
            f"--enable-lora and {connector} do not go together: it finds blocks by their tokens alone, and would give one "
            "adapter those of another"
        )
    if mode is DisaggregationMode.AGGREGATED:
        return VllmRole()
    if mode not in ROLES:
        raise InvalidArgument(f"--disaggregation-mode {mode.value}: vLLM has no such role here")
    if connector is None:
        role = "kv_producer" if mode is DisaggregationMode.PREFILL else "kv_consumer"
        raise InvalidArgument(
            f"--disaggregation-mode {mode.value} needs a way for the blocks; add "
            f'--kv-transfer-config \'{{"kv_connector": "NixlConnector", "kv_role": "{role}"}}\''
        )
    return VllmPrefillRole() if mode is DisaggregationMode.PREFILL else VllmDecodeRole()

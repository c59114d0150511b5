"""From the contract's request to the arguments of `AsyncLLM.generate`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dynamo.contract.engine import GenerateRequest
from dynamo.contract.requests.dp_rank import forced_dp_rank, validate_global_dp_rank
from dynamo.contract.requests.token_ids import token_ids_to_list
from dynamo.errors import InvalidArgument
from dynamo.vllm.adapters import LoadedAdapter, VllmAdapters
from dynamo.vllm.roles import TRANSFER, VllmRole
from dynamo.vllm.sampling import VllmLimits, constraint_of, read_sampling

SALT_PREFIX: Final = "dynamo-cache-salt:"  # salts come untagged in vLLM's KV events: this one is recognised


@dataclass(frozen=True, slots=True)
class Submission:
    """One request, as vLLM takes it."""

    prompt_tokens: int
    choices: int
    wants_logprobs: bool
    prompt: Any
    sampling: Any  # `SamplingParams`
    keywords: Mapping[str, Any]  # further ones of `AsyncLLM.generate`
    adapter: LoadedAdapter | None
    unwanted: str | None  # why the blocks of a prefill worker cannot be used, if so


class VllmSubmissions:
    """Reads the requests of one running engine."""

    def __init__(self, client: Any, config: Any, role: VllmRole, adapters: VllmAdapters) -> None:
        """`client`: vLLM's `AsyncLLM`. `config`: its `VllmConfig`."""
        model = config.model_config
        self._limits = VllmLimits(model.max_model_len, model.get_vocab_size(), model.get_diff_sampling_param())
        self._has_priorities = config.scheduler_config.policy == "priority"
        self._ranks = local_ranks(config)
        self._later = frozenset(inspect.signature(client.generate).parameters)  # what this release has
        self._role, self._adapters = role, adapters

    def read(self, request: GenerateRequest, transfer: dict[str, Any] | None) -> Submission:
        """Read a request; `transfer` is what vLLM's connector gets of it. Raises InvalidArgument naming the field."""
        prompt = token_ids_to_list(request["token_ids"])
        if not prompt:
            raise InvalidArgument("token_ids must not be empty")
        options = read_sampling(request, self._limits)
        self._role.adapt(options)
        unwanted = None if transfer is None else self._role.unwanted(options)
        return Submission(
            prompt_tokens=len(prompt),
            choices=options["n"],
            wants_logprobs="logprobs" in options or "logprob_token_ids" in options,
            prompt=self._prompt(prompt, request),
            sampling=self._sampling(options, request, None if unwanted else transfer),
            keywords=self._keywords(request),
            adapter=self._adapters.of(request),
            unwanted=unwanted,
        )

    def _prompt(self, prompt: list[int], request: GenerateRequest) -> Any:
        from vllm.inputs import tokens_input

        salt = (request.get("routing") or {}).get("cache_salt")
        return tokens_input(prompt, cache_salt=None if not salt else SALT_PREFIX + salt)

    def _sampling(self, options: dict[str, Any], request: GenerateRequest, transfer: dict[str, Any] | None) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        constraint = constraint_of(request) if self._role.draws_tokens else None
        guided = None if constraint is None else StructuredOutputsParams(**constraint)
        return SamplingParams(
            **options,
            structured_outputs=guided,
            extra_args=None if transfer is None else {TRANSFER: transfer},
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )

    def _keywords(self, request: GenerateRequest) -> dict[str, Any]:
        routing = request.get("routing") or {}
        keywords: dict[str, Any] = {}
        if self._has_priorities:
            keywords["priority"] = -(routing.get("priority") or 0)  # vLLM begins with the lowest
        rank = validate_global_dp_rank(forced_dp_rank(request), self._ranks.start, len(self._ranks), "vLLM")
        if rank is not None:
            keywords["data_parallel_rank"] = rank
        if "reasoning_ended" in self._later and not request.get("require_reasoning"):
            keywords["reasoning_ended"] = True  # a constraint holds from the first token on
        return keywords


def local_ranks(config: Any) -> range:
    """Return the data-parallel ranks of this worker. `config`: vLLM's `VllmConfig`."""
    parallel = config.parallel_config
    first = parallel.data_parallel_rank or 0
    return range(first, first + max(1, parallel.data_parallel_size_local or parallel.data_parallel_size))

"""What the reference engine serves of the frontend's routes of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamo.errors import InvalidArgument

DECLARED: Final = {"vllm_inference_v1_generate": True}
"""The runtime data by which a frontend knows that this engine serves vLLM's route."""

ENVELOPE: Final = "vllm_tito"

SERVED: Final = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "thinking_token_budget", "logprobs",
        "prompt_logprobs", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "stop_token_ids",
        "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "structured_outputs",
    }
)  # fmt: skip
"""The sampling parameters that reach this engine as options of any request; those without an effect on tokens are not refused."""

WITHOUT_EFFECT: Final = frozenset({"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"})


def check_envelope(extra_args: Mapping[str, object]) -> None:
    """Refuse what only vLLM has. Raises InvalidArgument naming the member."""
    envelope = extra_args.get(ENVELOPE)
    if not isinstance(envelope, Mapping):
        return
    sampling = envelope.get("sampling_params")
    for name, value in sampling.items() if isinstance(sampling, Mapping) else ():
        if value not in (None, False) and name not in SERVED and name not in WITHOUT_EFFECT:
            raise InvalidArgument(f"sampling_params.{name} is not supported by the reference engine")
    for name in ("features", "kv_transfer_params"):
        if envelope.get(name):
            raise InvalidArgument(f"{name} is not supported by the reference engine")

"""The settings of parts that are off unless their variables switch them on; there are no flags for them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.runtime.base.settings import FromEnvironment
from dynamo.settings.readers import switch, text
from dynamo.settings.table import setting


@dataclass(frozen=True, kw_only=True)
class TokenRouteSettings(FromEnvironment):
    """The routes that take tokens and answer with tokens."""

    # fmt: off
    vllm: bool = setting(False, "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", switch,
        "Serve vLLM's [route of tokens](token-routes.md#vllms-route), for workers that declare it")
    vllm_path: str = setting("/inference/v1/generate", "DYN_HTTP_SVC_VLLM_GENERATE_PATH", text,
        "Where vLLM's route of tokens lives")
    # fmt: on

"""The settings of parts that are off unless their variables switch them on; there are no flags for them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.runtime.base.settings import FromEnvironment
from dynamo.settings.readers import integer, port, seconds, switch, text, words
from dynamo.settings.table import setting


@dataclass(frozen=True, kw_only=True)
class TokenRouteSettings(FromEnvironment):
    """The routes that take tokens and answer with tokens."""

    # fmt: off
    vllm: bool = setting(False, "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE", switch,
        "Serve vLLM's [route of tokens](token-routes.md#vllms-route), for workers that declare it")
    vllm_path: str = setting("/inference/v1/generate", "DYN_HTTP_SVC_VLLM_GENERATE_PATH", text,
        "Where vLLM's route of tokens lives")
    sglang: bool = setting(False, "DYN_SGLANG_ENABLE_GENERATE", switch,
        "Serve SGLang's [route of tokens](token-routes.md#sglangs-route), for workers that declare it")
    sglang_path: str = setting("/generate", "DYN_HTTP_SVC_SGLANG_GENERATE_PATH", text,
        "Where SGLang's route of tokens lives")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class RlSettings(FromEnvironment):
    """The listener of trainers."""

    # fmt: off
    is_on: bool = setting(False, "DYN_ENABLE_RL", switch,
        "Of a frontend: [list the workers](token-routes.md#the-workers-of-a-trainer) that a trainer may pause and give new weights")
    host: str | None = setting(None, "DYN_RL_HOST", text,
        "Address of that listener; unset: that of the API")
    port: int = setting(8001, "DYN_RL_PORT", port, "Its port; 0: any free one, which the log names")
    endpoint: str = setting("rl", "DYN_RL_ENDPOINT", text, "Name of the reinforcement-learning directory endpoint")
    component: str | None = setting(None, "DYN_RL_COMPONENT", text, "Only workers of this component are listed")
    more_components: tuple[str, ...] = setting((), "DYN_RL_COMPONENTS", words,
        "Only workers of these components are listed, separated by commas")
    request_seconds: float = setting(30.0, "DYN_RL_REQUEST_TIMEOUT_SECS", seconds(0.001),
        "How long the answer of a worker is waited for")
    probes: int = setting(32, "DYN_RL_MAX_CONCURRENT_PROBES", integer(1), "How many workers are called at once")
    # fmt: on

    @property
    def components(self) -> frozenset[str]:
        """The components whose workers are listed; empty: all."""
        return frozenset(self.more_components) | ({self.component} if self.component else set())

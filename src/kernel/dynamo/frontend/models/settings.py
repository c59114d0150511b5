"""The settings of the models of the cluster: which are served, how they are loaded, how their workers are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dynamo.frontend.admission.model import RequestLimit
from dynamo.frontend.base.settings.fallbacks import FallbackSettings
from dynamo.frontend.models.file_policy import FilePolicy
from dynamo.placement.prefill_bypass import BypassRules
from dynamo.router.dispatch.conditional import ConditionalSettings
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.busy_settings import BusySettings
from dynamo.settings.choices import ROUTER_MODES
from dynamo.settings.readers import (
    SettingReader,
    above_zero,
    integer,
    one_of,
    seconds,
    switch,
    text,
)
from dynamo.settings.table import section, setting
from dynamo.text.quick_encoder import BACKENDS
from dynamo.text.template_budget import BudgetSpec

MIB: Final = 1024 * 1024


_HTTP: Final = "http"
_CLUSTER: Final = "cluster"
_REQUESTS: Final = "requests"


_request_limit: Final = SettingReader(RequestLimit.parse, metavar="N|Nx")


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """Whether the load is measured, and how full workers are meant to be."""

    # fmt: off
    autoscale: bool = setting(False, "DYN_AUTOSCALE", switch,
        "Measure how full the workers of each model are, as [metrics and JSON for autoscalers](scaling.md)",
        flag="--autoscale", group=_CLUSTER)
    autoscale_target: float = setting(0.7, "DYN_AUTOSCALE_TARGET", above_zero(1),
        "How full workers are meant to be; 1: full", flag="--autoscale-target", group=_CLUSTER)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ModelSettings(BusySettings, FallbackSettings, ScalingSettings):
    """Sizes in bytes, times in seconds; None means off or unknown unless a meaning states otherwise."""

    # fmt: off
    # Off: an engine's own queue is a legitimate place to wait.
    max_requests_per_model: RequestLimit | None = setting(None, "DYN_HTTP_MAX_REQUESTS_PER_MODEL", _request_limit,
        "The same for each model: `64`, or `1.5x` for so many times what its workers run at once (`max_num_seqs`). "
        "The last places are for requests of higher priority. See [overload](errors.md#overload)",
        flag="--max-requests-per-model", group=_HTTP)
    max_queue_age_seconds: float | None = setting(None, "DYN_HTTP_MAX_QUEUE_AGE_SECS", seconds(),
        "A model whose oldest request has waited longer for its first token gets no more; 0: never. Unset: 120 where "
        "all its workers say their `max_num_seqs`, else never", flag="--max-queue-age", group=_HTTP)
    capacity_share: float = 1.0  # of the models' capacity that is this process's: one of several on a port has a part
    namespace: str | None = setting(None, "DYN_NAMESPACE", text,
        "Serve models of this namespace only", flag="--namespace", group=_CLUSTER)
    namespace_prefix: str | None = setting(None, "DYN_NAMESPACE_PREFIX", text,
        "Serve models of namespaces that begin so; wins over `--namespace`", flag="--namespace-prefix", group=_CLUSTER)
    starting_model: str | None = setting(None, "DYN_STARTING_MODEL", text,
        "A model that is being started: until a first worker has registered, requests for it get a 503 with "
        "`Retry-After`, not a 404. `dynamo serve` sets it", flag="--starting-model", group=_CLUSTER)
    router_mode: str = setting("round-robin", "DYN_ROUTER_MODE", one_of(*ROUTER_MODES, metavar="MODE"),
        "How a worker is chosen: `round-robin`, `random`, `power-of-two`, `least-loaded`, `kv` (by what the workers have "
        "cached and what they have to do: [KV routing](#kv-routing)), `direct` or `device-aware-weighted`", flag="--router-mode", group=_CLUSTER)
    router_min_initial_workers: int = setting(0, "DYN_ROUTER_MIN_INITIAL_WORKERS", integer(0),
        "A model gets no requests before so many workers of it are there at once, in each namespace and role that answers; "
        "it keeps getting them when they leave. 0: one is enough", flag="--router-min-initial-workers", group=_CLUSTER)
    replacement_wait_seconds: float = setting(10.0, "DYN_REPLACEMENT_WAIT_SECS", seconds(),
        "How long a request waits for [a replacement](migration.md#the-last-worker) when the model's last worker was "
        "lost; 0: not at all", flag="--replacement-wait-seconds", group=_CLUSTER)
    cold_start_wait_seconds: float = setting(0.0, "DYN_COLD_START_WAIT_SECS", seconds(),
        "A model that has lost its last worker stays listed, and its requests wait so long for the next one, as where "
        "[workers are scaled to none](scaling.md#none-at-all); 0: it goes after the replacement wait",
        flag="--cold-start-wait-seconds", group=_CLUSTER)
    residency_descriptor: int | None = setting(None, "DYN_RESIDENCY_DESCRIPTOR", integer(0),
        "The descriptor of the socket over which `dynamo serve` loads and unloads [many models](many-models.md), of which "
        "it takes the requests; that command sets it", flag="--residency-descriptor", group=_CLUSTER)
    enforce_disagg: bool = setting(False, "DYN_ENFORCE_DISAGG", switch,
        "A prompt that no prefill worker can take fails with 503, instead of being computed by its decode worker. "
        "See [disaggregation](disaggregation.md)", flag="--enforce-disagg", group=_CLUSTER)
    custom_jinja_template: str | None = setting(None, "DYN_CUSTOM_JINJA_TEMPLATE", SettingReader(str, metavar="FILE"),
        "A Jinja template that replaces every model's own", flag="--chat-template", group=_REQUESTS)
    tokenizer: str = setting("auto", "DYN_TOKENIZER", one_of(*BACKENDS),
        "What encodes prompts: `fastokens`, at a tenth of the CPU where it gives the same ids; `default`, the tokenizers "
        "library; `auto`: as the worker demands, else the first as soon as [it pays](performance.md#the-tokeniser)",
        flag="--tokenizer", group=_REQUESTS)
    tokenizer_fallback: bool = setting(True, "DYN_TOKENIZER_FALLBACK", switch,
        "A model that `--tokenizer fastokens` cannot be had for gets the default; off: it is not served",
        flag="--tokenizer-fallback", group=_REQUESTS)
    tokenizer_cache_bytes: int = setting(64 * MIB, "DYN_TOKENIZER_CACHE_BYTES", integer(0, unit="bytes"),
        "How much of that, per model")
    template_budget: BudgetSpec = section(BudgetSpec)
    max_models: int = setting(2000, "DYN_MAX_MODELS", integer(1),
        "Models by name, namespace and role, adapters included")
    concurrent_model_loads: int = setting(2, "DYN_CONCURRENT_MODEL_LOADS", integer(1),
        "Models whose files are fetched and read at once, in threads of their own")
    model_files: FilePolicy = section(FilePolicy)
    model_cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "dynamo" / "mdc" / "by-slug")
    kv_router: KvRouterSettings = section(KvRouterSettings)
    conditional_disagg: ConditionalSettings = section(ConditionalSettings)
    # fmt: on

    def bypass_rules(self) -> BypassRules | None:
        """Return the rules by which decode workers compute prompts alone; None: they never do.

        Raises ValueError for rules that need a threshold that is not given.
        """
        conditional = self.conditional_disagg
        return conditional.rules.with_default(self.kv_router.router_queue_threshold) if conditional.is_on else None

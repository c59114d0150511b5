"""The native module's names for the worker and its configuration: re-exports, and the native constructors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from enum import Enum
from typing import Any

from dynamo.contract.config import (
    DEFAULT_COMPONENT,
    DEFAULT_ENDPOINT,
    DEFAULT_ENDPOINT_TYPES,
    RuntimeConfig,
)
from dynamo.contract.config import WorkerConfig as _WorkerConfig
from dynamo.contract.engine import BaseEngine, RawEngine
from dynamo.contract.engine_config import EngineConfig, LlmRegistration
from dynamo.contract.health_check import HEALTH_CHECK_KEY
from dynamo.contract.metrics import EngineMetrics
from dynamo.contract.modes import NativeDisaggregationMode as DisaggregationMode
from dynamo.contract.modes import coerce_disaggregation_mode
from dynamo.protocol.model_types import ModelInput
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.settings.table import setting_of
from dynamo.worker.kv_publishing.publisher import SnapshotPublisher
from dynamo.worker.worker import Worker as _Worker

__all__ = [
    "HEALTH_CHECK_KEY", "DisaggregationMode", "EngineConfig", "EngineMetrics", "LlmRegistration", "RuntimeConfig",
    "SnapshotPublisher", "Worker", "WorkerConfig",
]  # fmt: skip


class WorkerConfig(_WorkerConfig):
    """The native constructor: the planes are those of `runtime`, and where it names none, those of the environment."""

    def __init__(
        self,
        namespace: str,
        component: str = DEFAULT_COMPONENT,
        endpoint: str = DEFAULT_ENDPOINT,
        model_name: str = "",
        served_model_name: str | None = None,
        model_input: ModelInput = ModelInput.Tokens,
        endpoint_types: str = DEFAULT_ENDPOINT_TYPES,
        custom_jinja_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        exclude_tools_when_tool_choice_none: bool = True,
        enable_local_indexer: bool = True,
        enable_kv_routing: bool = True,
        metrics_labels: Iterable[tuple[str, str]] = (),
        runtime: RuntimeConfig | None = None,
        disaggregation_mode: Enum | None = None,
        health_check_payload: dict[str, Any] | None = None,
        structural_tag: dict[str, Any] | None = None,
        route_to_encoder: bool = False,
        media_decoder: Any = None,
        media_fetcher: Any = None,
        kv_state_endpoint: str | None = None,
        default_thinking_mode: str | None = None,
        **fields: Any,
    ) -> None:
        """Take the 23 native arguments, by position or by name. `fields` are those of `WorkerConfig` that are not native."""
        planes = runtime or RuntimeConfig()
        chosen: dict[str, Any] = {
            "discovery_backend": planes.discovery_backend or "",  # empty: the runtime reads its variable
            "request_plane": planes.request_plane or "",
            "event_plane": planes.event_plane,
            "response_plane": planes.response_plane
            or setting_of(RuntimeSettings, "response_plane").value(os.environ)
            or "tcp",
        }
        super().__init__(
            namespace,
            component,
            endpoint,
            model_name,
            served_model_name,
            model_input,
            endpoint_types,
            custom_jinja_template=custom_jinja_template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            exclude_tools_when_tool_choice_none=exclude_tools_when_tool_choice_none,
            enable_local_indexer=enable_local_indexer,
            enable_kv_routing=enable_kv_routing,
            metrics_labels=list(metrics_labels),
            disaggregation_mode=coerce_disaggregation_mode(disaggregation_mode),
            health_check_payload=health_check_payload,
            structural_tag=structural_tag,
            route_to_encoder=route_to_encoder,
            media_decoder=media_decoder,
            media_fetcher=media_fetcher,
            kv_state_endpoint=kv_state_endpoint,
            default_thinking_mode=default_thinking_mode,
            **{**chosen, **fields},
        )


class Worker(_Worker):
    """The native constructor: the event loop that will run the engine, and whether the engine is raw."""

    def __init__(
        self,
        engine: BaseEngine,
        config: _WorkerConfig,
        event_loop: asyncio.AbstractEventLoop | None = None,
        raw: bool = False,
        **options: Any,
    ) -> None:
        """Take the native arguments; `options` are those of `dynamo.common.backend.Worker`. Raises TypeError for `raw` with a token engine."""
        if raw and not isinstance(engine, RawEngine):
            raise TypeError(f"raw=True needs a RawEngine, got {type(engine).__name__}")
        super().__init__(engine, config, **options)
        self._event_loop = event_loop

    async def run(self) -> None:
        """Serve, as `dynamo.common.backend.Worker.run`. Raises RuntimeError on another loop than the one given."""
        if self._event_loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError("Worker.run() was called on another event loop than the one it was created with")
        await super().run()

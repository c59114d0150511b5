"""Brings vLLM up: its configuration, threads and directories, and what it says on the way. Runs in a thread."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.errors import EngineShutdown
from dynamo.runtime.tasks import Background
from dynamo.vllm.arguments import Arguments
from dynamo.vllm.installed import import_vllm
from dynamo.vllm.reports import LoadReports, events_address

__all__ = ["Started", "bind_threads", "start_vllm"]

logger = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 10.0
BIND: Final = "VLLM_CPU_OMP_THREADS_BIND"
THREADS: Final = "OMP_NUM_THREADS"
TEMPORARY: Final = "TMPDIR"


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine."""

    client: Any  # `AsyncLLM`
    config: Any  # `VllmConfig`
    directory: Path  # of its temporary files and sockets; removed when the engine is


async def start_vllm(arguments: Arguments, reports: LoadReports) -> Started:
    """Start the engine; the log says every ten seconds that it is still under way. Raises EngineShutdown."""
    began = time.perf_counter()
    logger.info("starting vLLM with %s; its processes load their libraries first", arguments.model)
    async with Background() as beside:
        beside.start(_progress(began), "progress of the start")
        started = await asyncio.to_thread(_start, arguments, reports)
    logger.info("vLLM has started in %.1f s", time.perf_counter() - began)
    return started


async def _progress(began: float) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        logger.info("vLLM is starting, for %.0f s now", time.perf_counter() - began)


def _start(arguments: Arguments, reports: LoadReports) -> Started:
    vllm = import_vllm()
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        bind_threads(
            os.environ, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    directory = Path(tempfile.mkdtemp(prefix="dynamo-vllm-"))
    before = os.environ.get(TEMPORARY)
    os.environ[TEMPORARY] = str(directory)  # each engine leaves files there
    try:
        args = arguments.vllm
        args.enable_log_requests = False
        if args.enable_prefix_caching is not False and arguments.is_kv_routed and not arguments.has_kv_events_config:
            from vllm.config import KVEventsConfig

            args.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=events_address(directory)
            )
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        client = AsyncLLM.from_vllm_config(
            config, usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=[reports.factory()]
        )
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineShutdown(
            f"vLLM {vllm.__version__} did not start: {error} (its own log, above, says more)"
        ) from error
    finally:
        _restore(before)
    return Started(client, config, directory)


def _restore(temporary: str | None) -> None:
    if temporary is None:
        del os.environ[TEMPORARY]
    else:
        os.environ[TEMPORARY] = temporary


def bind_threads(environment: MutableMapping[str, str], cores: int, log: Callable[[str], None] = logger.info) -> None:
    """Choose how vLLM's threads use a CPU, where the operator has not, and say so.

    vLLM's own choice ties the engine to the first cores: two engines on a machine then share these, and stand still.
    """
    chosen = {}
    if BIND not in environment:
        chosen[BIND] = "nobind"
    if THREADS not in environment:
        chosen[THREADS] = str(max(1, cores - 1))  # one core is left for the worker's own loop
    environment.update(chosen)
    if chosen:
        log(
            f"vLLM runs on the CPU: {', '.join(f'{name}={value}' for name, value in chosen.items())}; set them to choose otherwise"
        )

"""Brings vLLM up: its configuration, threads and directories, and its progress in the log. Runs in a thread."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.errors import EngineShutdown, InvalidArgument
from dynamo.runtime.base.addresses import WILDCARDS, bound_socket, detect_host
from dynamo.runtime.base.process_guard import SOCKET_PATH, private_directory, temporary_files_in
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.runtime.base.tasks import Background
from dynamo.settings.foreign import OPENMP_THREADS
from dynamo.vllm.adapters import SPARE_SLOTS
from dynamo.vllm.arguments import Arguments
from dynamo.vllm.errors import configuration_error
from dynamo.vllm.installed import import_vllm
from dynamo.vllm.model_files import is_local
from dynamo.vllm.reports import LoadReports, events_address

logger = logging.getLogger(__name__)

PROGRESS_SECONDS: Final = 10.0
BIND: Final = "VLLM_CPU_OMP_THREADS_BIND"
THREADS: Final = str(OPENMP_THREADS.variable)
SOCKETS: Final = "VLLM_RPC_BASE_PATH"
SOCKET_NAME: Final = 36  # characters: vLLM names each by a UUID
NIXL: Final = "NixlConnector"
NIXL_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
NIXL_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
PORT_ATTEMPTS: Final = 20


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine."""

    client: Any  # `AsyncLLM`
    config: Any  # `VllmConfig`
    directory: Path  # of its temporary files and sockets; removed when the engine is
    is_cpu: bool


async def start_vllm(arguments: Arguments, reports: LoadReports) -> Started:
    """Start the engine; a log line every ten seconds reports that it is still under way. Raises EngineShutdown,
    and InvalidArgument for a model or flags with which the next start would fail as well."""
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

    # vLLM chooses how many requests and tokens a step has by what it is used for: as many as `vllm serve` has.
    context = UsageContext.OPENAI_API_SERVER
    is_cpu = bool(current_platform.is_cpu())
    if is_cpu:
        bind_threads(
            os.environ, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    directory = private_directory("vllm")
    try:
        args = arguments.vllm
        args.enable_log_requests = False
        if is_cpu and args.enable_lora:
            args.max_loras += SPARE_SLOTS
            if args.max_cpu_loras is not None:
                args.max_cpu_loras = max(args.max_cpu_loras, args.max_loras)
        if args.enable_prefix_caching is not False and arguments.is_kv_routed and not arguments.has_kv_events_config:
            from vllm.config import KVEventsConfig

            args.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=events_address(directory)
            )
        # Each engine leaves files in the directory for temporary ones.
        _remember_variables(False)  # another engine of this process may have had others
        variables = {**_socket_directory(directory, os.environ), **transfer_addresses(args, os.environ)}
        with temporary_files_in(directory), _variables(variables):
            config = _configuration(arguments, args, context)
            client = AsyncLLM.from_vllm_config(config, usage_context=context, stat_loggers=[reports.factory()])
    except InvalidArgument:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineShutdown(
            f"vLLM {vllm.__version__} did not start: {error} (its own log, above, has the details)"
        ) from error
    _remember_variables(True)
    return Started(client, config, directory, is_cpu)


def _configuration(arguments: Arguments, args: Any, context: Any) -> Any:
    """Return vLLM's `VllmConfig`. Raises InvalidArgument for flags or a model with which it can never start."""
    try:
        config = args.create_engine_config(context)
    except Exception as error:
        refusal = configuration_error(error, is_local=is_local(arguments.model))
        if refusal is None:
            raise
        raise refusal from error
    profiler: Any = getattr(config, "profiler_config", None)
    if hasattr(profiler, "ignore_frontend"):
        # vLLM starts and stops torch's profiler of this process in a pool of threads; in another thread torch crashes.
        profiler.ignore_frontend = True
    return config


def _remember_variables(is_on: bool) -> None:
    """Let vLLM read each of its variables once, instead of one of them for every token. Its own processes do the same."""
    from vllm import envs

    change = getattr(envs, "enable_envs_cache" if is_on else "disable_envs_cache", None)
    if change is not None:
        change()


def _socket_directory(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return where vLLM puts the sockets between its processes: where temporary files are unless that path is too long."""
    is_short = len(os.fsencode(directory)) + 1 + SOCKET_NAME <= SOCKET_PATH
    return {} if SOCKETS in environment else {SOCKETS: str(directory if is_short else directory.parent)}


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def transfer_addresses(args: Any, environment: Mapping[str, str]) -> dict[str, str]:
    """Return where NIXL's halves of two workers find each other, as far as the operator has not set it.

    vLLM's own choice is one port on every machine, reachable from that machine only. Rank r adds r to the port.
    """
    transfer = args.kv_transfer_config
    if transfer is None or NIXL not in str(transfer):
        return {}
    host = environment.get(NIXL_HOST) or RequestPlaneSettings.from_env(environment).rpc_host or detect_host()
    if host in WILDCARDS:
        host = detect_host()
    chosen = {NIXL_HOST: host, NIXL_PORT: environment.get(NIXL_PORT) or str(_free_ports(host, args.data_parallel_size))}
    logger.info("KV blocks are announced at %s:%s (%s)", host, chosen[NIXL_PORT], NIXL)
    return chosen


def _free_ports(host: str, count: int) -> int:
    """Return the first of `count` ports in a row that are free now. Raises EngineShutdown where there are none."""
    for _ in range(PORT_ATTEMPTS):
        with ExitStack() as held:
            first = held.enter_context(bound_socket(host, 0)).getsockname()[1]
            try:
                for number in range(first + 1, first + count):
                    held.enter_context(bound_socket(host, number))
            except (OSError, OverflowError):
                continue
            return int(first)
    raise EngineShutdown(f"no {count} free ports in a row for {NIXL} on {host}; choose some with {NIXL_PORT}")


def bind_threads(environment: MutableMapping[str, str], cores: int, log: Callable[[str], None] = logger.info) -> None:
    """Choose how vLLM's threads use a CPU, where the operator has not, and log it.

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

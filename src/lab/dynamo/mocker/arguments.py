"""From the command line of the mocker to its workers: one engine and one worker configuration each."""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import DEFAULT_COMPONENT, WorkerConfig
from dynamo.contract.modes import DisaggregationMode
from dynamo.engines.native_flags import refuse_media_output
from dynamo.errors import InvalidArgument
from dynamo.mocker.configuration import (
    AIS,
    DEFAULT_BLOCK_SIZES,
    MockOptions,
    read_configuration,
    read_configuration_file,
)
from dynamo.mocker.settings import REFUSED_FLAGS, MockerSettings
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.runtime.base.addresses import bind_host
from dynamo.runtime.base.settings import RuntimeSettings, discovery_store
from dynamo.settings.flags import add_flags
from dynamo.settings.table import read_settings, settings_of

logger = logging.getLogger(__name__)

# How many bytes of KV cache one token takes, from a model's config.json.


_NESTED: Final = ("text_config", "llm_config", "language_config", "decoder", "thinker_config")
_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "int8": 1}
_UNKNOWN_BYTES: Final = 2


def kv_bytes_per_token(model_path: str, dtype: str = "auto") -> int | None:
    """Return layers x 2 x KV heads x head size x bytes; None where no config.json has them."""
    file = Path(model_path).expanduser() / "config.json"
    if not model_path or not file.is_file():
        return None
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        return _size(config, dtype)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        logger.info("%s does not have the size of a token's cache (%s: %s)", file, type(error).__name__, error)
        return None


def _size(config: JsonMapping, dtype: str) -> int:
    sizes = config
    while "num_hidden_layers" not in sizes:
        found = next((sizes[name] for name in _NESTED if isinstance(sizes.get(name), dict)), None)
        if found is None:
            raise KeyError("num_hidden_layers")
        sizes = found
    heads = int(sizes["num_attention_heads"])
    kv_heads = int(sizes.get("num_key_value_heads") or heads)
    head_size = int(sizes["hidden_size"]) // heads
    kind = dtype
    if dtype == "auto":
        kind = sizes.get("torch_dtype") or sizes.get("dtype") or config.get("torch_dtype") or config.get("dtype") or ""
    return int(sizes["num_hidden_layers"]) * 2 * kv_heads * head_size * _bytes(str(kind))


def _bytes(dtype: str) -> int:
    name = dtype.lower().removeprefix("torch.")
    return 1 if name.startswith(("fp8", "float8")) else _BYTES.get(name, _UNKNOWN_BYTES)


PREFILL_COMPONENT: Final = "prefill"
DESCRIPTION: Final = """\
Workers without a model that behave like real ones: they schedule, cache, take time, publish KV events and load, and
answer with random tokens.

    python -m dynamo.mocker --model-path my-model                  one worker
    python -m dynamo.mocker --model-path my-model --num-workers 8 --speedup-ratio 10
"""
_AIS_FLAGS: Final = (
    "perf-model", "perf-config", "system", "backend", "backend-version", "tp-size", "moe-tp-size", "moe-ep-size",
    "attention-dp-size",
)  # fmt: skip
_MEMORY_FLAGS: Final = ("--gpu-memory-utilization", "--mem-fraction-static", "--free-gpu-memory-fraction")
_ROLES: Final = {
    DisaggregationMode.AGGREGATED: "aggregated",
    DisaggregationMode.PREFILL: "prefill",
    DisaggregationMode.DECODE: "decode",
}


@dataclass(frozen=True, slots=True)
class MockWorker:
    """One worker of a process."""

    model: str
    options: MockOptions
    seed: int
    config: WorkerConfig


@dataclass(frozen=True, slots=True)
class MockFleet:
    """The workers of one process, and the time between their starts."""

    workers: tuple[MockWorker, ...]
    stagger_seconds: float


class _NeedsAis(argparse.Action):
    """Refuse a flag of external timing, with the reason."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        parser.error(f"{option}: {AIS}")


def read_arguments(argv: list[str] | None) -> MockFleet:
    """Read the command line. Ends the process for a mistake (status 2)."""
    parser = BackendArgumentParser("dynamo.mocker", description=DESCRIPTION)
    add_flags(parser, (made for _, made in settings_of(MockerSettings)), os.environ)
    add_flags(parser, REFUSED_FLAGS, os.environ)
    for name in _AIS_FLAGS:
        parser.add_argument(
            f"--ais-{name}",
            f"--aic-{name}",
            action=_NeedsAis,
            nargs="?",
            help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
        )
    for flag in _MEMORY_FLAGS:
        parser.add_argument(flag, action=_NeedsAis, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    add_backend_arguments(parser)
    args = parser.parse_args(argv)
    settings = read_settings(MockerSettings, os.environ, vars(args))
    try:
        refuse_media_output(argv)
        return _fleet(settings, args)
    except InvalidArgument as error:
        parser.error(str(error))


def _fleet(settings: MockerSettings, args: argparse.Namespace) -> MockFleet:
    path = settings.model_path or settings.model_name
    if path is None:
        raise InvalidArgument("--model-path is needed (a model directory, or any name), or --model-name")
    args.disaggregation_mode = _role(settings, args.disaggregation_mode)
    if args.disaggregation_mode is DisaggregationMode.PREFILL and args.component == DEFAULT_COMPONENT:
        args.component = PREFILL_COMPONENT
    directory = Path(path).expanduser()
    model = settings.model_name or (directory.resolve().name if directory.is_dir() else path)
    config = worker_config_from(args, model_name=path, served_model_name=model)
    document = _document(settings, args.disaggregation_mode)
    options = read_configuration(document)
    role = _ROLES[args.disaggregation_mode]
    if options.scheduler.role != role:
        raise InvalidArgument(
            f"engine.worker_type is {options.scheduler.role}, but --disaggregation-mode makes it {role}: give both"
        )
    store = discovery_store(config.discovery_backend, os.environ.get("ETCD_ENDPOINTS"))
    options = replace(options, listen_host=bind_host(store, None, "0.0.0.0"))
    config = replace(
        config,
        enable_local_indexer=config.enable_local_indexer and options.enable_local_indexer and options.has_kv_events,
    )
    workers = tuple(_worker(number, settings, model, options, config) for number in range(settings.num_workers))
    return MockFleet(workers, _stagger(settings))


def _role(settings: MockerSettings, mode: DisaggregationMode) -> DisaggregationMode:
    old = [
        role
        for is_given, role in (
            (settings.is_prefill_worker, DisaggregationMode.PREFILL),
            (settings.is_decode_worker, DisaggregationMode.DECODE),
        )
        if is_given
    ]
    if old and (len(old) > 1 or mode is not DisaggregationMode.AGGREGATED):
        raise InvalidArgument(
            "--is-prefill-worker, --is-decode-worker and --disaggregation-mode mean the same: give one of them"
        )
    mode = old[0] if old else mode
    if mode not in _ROLES:
        raise InvalidArgument(f"--disaggregation-mode {mode.value}: the mocker has no such role")
    return mode


def _document(settings: MockerSettings, mode: DisaggregationMode) -> Any:
    """Return the configuration that the flags, or the file, describe."""
    if settings.extra_engine_args is not None:
        return read_configuration_file(Path(settings.extra_engine_args))
    size = settings.kv_bytes_per_token
    if size is None:
        size = kv_bytes_per_token(settings.model_path or "", settings.kv_cache_dtype)
    try:
        reasoning = None if settings.reasoning is None else json.loads(settings.reasoning)
    except ValueError as error:
        raise InvalidArgument(f"--reasoning is not JSON: {error}") from error
    timing: JsonObject = {"type": "polynomial"}
    if settings.planner_profile_data is not None:
        profile = {"path": str(settings.planner_profile_data)}
        timing = {"type": "external", "provider": "dynamo_profile", "config": profile}
    return {
        "engine": {
            "backend": settings.engine_type,
            "num_gpu_blocks": settings.num_gpu_blocks,
            "block_size": settings.block_size or DEFAULT_BLOCK_SIZES[settings.engine_type],
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "enable_chunked_prefill": settings.enable_chunked_prefill,
            "speedup_ratio": settings.speedup_ratio,
            "decode_speedup_ratio": settings.decode_speedup_ratio,
            "aic_nextn": settings.nextn,
            "aic_nextn_accept_rates": settings.accept_rates,
            "aic_mtp_seed": settings.seed,
            "worker_type": _ROLES[mode],
            "preemption_mode": settings.preemption_mode,
            "kv_transfer_bytes_per_token": size,
            "kv_transfer_bandwidth": settings.kv_transfer_bandwidth,
            "kv_transfer_timing_mode": settings.kv_transfer_timing_mode,
            "native_host_offload": _host_offload(settings),
            "timing_model": timing,
            "sglang": {
                "schedule_policy": settings.sglang_schedule_policy,
                "max_prefill_tokens": settings.sglang_max_prefill_tokens,
                "chunked_prefill_size": settings.sglang_chunked_prefill_size,
                "clip_max_new_tokens": settings.sglang_clip_max_new_tokens,
                "schedule_conservativeness": settings.sglang_schedule_conservativeness,
            },
        },
        "dp_size": settings.data_parallel_size,
        "startup_time": settings.startup_time,
        "dynamo": {"reasoning": reasoning, "response_replay_trace_path": settings.response_replay_trace_path},
    }


def _host_offload(settings: MockerSettings) -> JsonObject | None:
    bandwidths = {
        name: value
        for name, value in (
            ("d2h_bandwidth_gbps", settings.host_offload_d2h_bandwidth_gbps),
            ("h2d_bandwidth_gbps", settings.host_offload_h2d_bandwidth_gbps),
        )
        if value is not None
    }
    if settings.num_host_blocks is None:
        if bandwidths:
            raise InvalidArgument("--host-offload-d2h- and -h2d-bandwidth-gbps need --num-host-blocks")
        return None
    return {"num_host_blocks": settings.num_host_blocks, **bandwidths}


def _worker(
    number: int, settings: MockerSettings, model: str, options: MockOptions, config: WorkerConfig
) -> MockWorker:
    """Make worker `number` of the process: its own seed and its own ports."""
    events = _port(settings, settings.zmq_kv_events_ports, "--zmq-kv-events-ports", number)
    again = _port(settings, settings.zmq_replay_ports, "--zmq-replay-ports", number)
    if events is not None:
        options = replace(options, zmq_kv_events_port=events)
    if again is not None:
        options = replace(options, zmq_replay_port=again)
    meeting = _port(settings, settings.bootstrap_ports, "--bootstrap-ports", number)
    if meeting is not None:
        options = replace(options, bootstrap_port=meeting)
    if options.bootstrap_port is not None and options.scheduler.role != "prefill":
        raise InvalidArgument("--bootstrap-ports is for prefill workers only")
    if options.zmq_replay_port is not None and options.zmq_kv_events_port is None:
        raise InvalidArgument("--zmq-replay-ports needs --zmq-kv-events-ports")
    if number and config.runtime_settings is not None:
        config = replace(config, runtime_settings=_shifted(config.runtime_settings, number))
    return MockWorker(model, options, options.seed + number, config)


def _port(settings: MockerSettings, ports: tuple[int, ...] | None, flag: str, number: int) -> int | None:
    if ports is None:
        return None
    if len(ports) != settings.num_workers:
        raise InvalidArgument(f"{flag} needs one port for each of the {settings.num_workers} workers, got {len(ports)}")
    return ports[number]


def _shifted(runtime: RuntimeSettings, number: int) -> RuntimeSettings:
    """Give worker `number` listeners of its own: fixed ports count up, "any free port" stays that."""
    system, requests = runtime.system, runtime.requests

    def own(port: int | None) -> Any:
        return port + number if port is not None and port > 0 else port

    return replace(
        runtime,
        system=replace(system, port=own(system.port), admin_port=own(system.admin_port)),
        requests=replace(requests, rpc_port=own(requests.rpc_port), response_port=own(requests.response_port)),
    )


def _stagger(settings: MockerSettings) -> float:
    if settings.stagger_delay >= 0:
        return settings.stagger_delay
    return 0.0 if settings.num_workers <= 32 else 0.1 if settings.num_workers <= 128 else 0.2

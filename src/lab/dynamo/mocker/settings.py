"""The flags of `python -m dynamo.mocker`, beside those of every worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.settings.readers import (
    SettingReader,
    file_path,
    integer,
    number,
    one_of,
    port,
    switch,
    text,
)
from dynamo.settings.table import Status, declared, setting

BOOTSTRAP_HOST: Final = declared(
    "DYN_HTTP_RPC_HOST",
    text,
    "Address at which decode workers reach a prefill worker's `--bootstrap-ports`; unset: this machine's",
)

_MODEL: Final = "model and workers"
_CACHE: Final = "scheduler and cache"
_TIME: Final = "time"
_OUTPUT: Final = "answers"
_EVENTS: Final = "KV events and hand-off"
_SGLANG: Final = "sglang only"


def _read_ports(given: str) -> tuple[int, ...]:
    return tuple(port.parse(part.strip()) for part in given.split(","))


def _read_rates(given: str) -> tuple[float, ...]:
    return tuple(number(0, 1).parse(part.strip()) for part in given.split(","))


def _read_policy(given: str) -> str:
    return one_of("fifo", "lpm").parse("fifo" if given.lower() == "fcfs" else given)


_ports: Final[SettingReader[tuple[int, ...]]] = SettingReader(
    _read_ports, show=lambda value: ",".join(map(str, value)), metavar="PORTS"
)
_rates: Final[SettingReader[tuple[float, ...]]] = SettingReader(
    _read_rates, show=lambda value: ",".join(f"{rate:g}" for rate in value), metavar="RATES"
)
_policy: Final = SettingReader(_read_policy)
_path: Final[SettingReader[Path]] = SettingReader(lambda given: Path(given).expanduser(), metavar="PATH")


@dataclass(frozen=True, slots=True)
class MockerSettings:
    """The mock engines, as the command line has them; a field that is None was not given."""

    # fmt: off
    model_path: str | None = setting(None, None, text,
        "Directory of a model (tokenizer, chat template, sizes), or only a name: then the frontend uses its byte "
        "tokenizer. Needed, or `--model-name`", flag="--model-path", group=_MODEL)
    model_name: str | None = setting(None, None, text,
        "Name that clients use", flag="--model-name", group=_MODEL, shown="that of the path")
    num_workers: int = setting(1, None, integer(1, 4096),
        "Workers in this process, each with its own runtime, lease and instance id", flag="--num-workers",
        group=_MODEL)
    stagger_delay: float = setting(0.0, None, number(-1, unit="s", metavar="SECONDS"),
        "Time between the starts of two workers; -1: 0.1 s for 33 to 128 workers, 0.2 s above. With any delay there is "
        "a pause of 2 s after every 32", flag="--stagger-delay", group=_MODEL)
    startup_time: float | None = setting(None, None, number(0, unit="s", metavar="SECONDS"),
        "How long a worker takes to start", flag="--startup-time", group=_MODEL)
    data_parallel_size: int = setting(1, None, integer(1, 1024),
        "Data-parallel ranks of each worker; each has a scheduler and a cache, and they take their passes in step",
        flag="--data-parallel-size", group=_MODEL)
    extra_engine_args: str | None = setting(None, None, file_path,
        "File with the configuration as JSON, in place of the flags of the engine; see "
        "[the configuration](mocker.md#the-configuration)", flag="--extra-engine-args", group=_MODEL)
    is_prefill_worker: bool = setting(False, None, switch,
        "The old form of `--disaggregation-mode prefill`", flag="--is-prefill-worker", group=_MODEL)
    is_decode_worker: bool = setting(False, None, switch,
        "The old form of `--disaggregation-mode decode`", flag="--is-decode-worker", group=_MODEL)

    engine_type: str = setting("vllm", None, one_of("vllm", "sglang", "trtllm"),
        "Whose scheduler is simulated: `vllm`, `sglang` or `trtllm`", flag="--engine-type", group=_CACHE)
    num_gpu_blocks: int = setting(16384, None, integer(1),
        "Blocks in the cache of each rank", flag="--num-gpu-blocks-override", dest="num_gpu_blocks", group=_CACHE)
    block_size: int | None = setting(None, None, integer(1),
        "Tokens per block; vllm and trtllm need 2 or more", flag=("--block-size", "--sglang-page-size"), group=_CACHE,
        shown="vllm 64, sglang 1, trtllm 32")
    max_model_len: int | None = setting(None, None, integer(2, metavar="TOKENS"),
        "Longest prompt and answer together; a prompt that long is rejected", flag="--max-model-len", group=_CACHE,
        shown="what the cache holds")
    max_num_seqs: int = setting(256, None, integer(1),
        "Requests that run at once", flag="--max-num-seqs", group=_CACHE)
    max_num_batched_tokens: int = setting(8192, None, integer(1, metavar="TOKENS"),
        "Tokens that one pass computes (vllm, trtllm)", flag="--max-num-batched-tokens", group=_CACHE)
    enable_prefix_caching: bool = setting(True, None, switch,
        "Keep the blocks of ended requests and reuse them; off: no KV events either", flag="--enable-prefix-caching",
        group=_CACHE)
    enable_chunked_prefill: bool = setting(True, None, switch,
        "Compute long prompts in chunks; cannot be off for sglang", flag="--enable-chunked-prefill", group=_CACHE)
    preemption_mode: str = setting("lifo", None, one_of("lifo", "fifo"),
        "Which running request gives way when blocks run out (vllm): `lifo` the newest, `fifo` the oldest",
        flag="--preemption-mode", group=_CACHE)
    trtllm_capacity_scheduler_policy: str = setting("guaranteed_no_evict", None, one_of("guaranteed_no_evict"),
        "Policy of trtllm; there is one", flag="--trtllm-capacity-scheduler-policy", group=_CACHE)
    num_host_blocks: int | None = setting(None, None, integer(1),
        "Blocks of a second tier of the cache in host memory, for each rank (vllm); see "
        "[the host tier](mocker.md#the-host-tier)", flag="--num-host-blocks", group=_CACHE, shown="no such tier")
    host_offload_d2h_bandwidth_gbps: float | None = setting(None, None, number(0, unit="GB/s"),
        "Speed of copies to the host; needs `--num-host-blocks`", flag="--host-offload-d2h-bandwidth-gbps",
        group=_CACHE, shown="32")
    host_offload_h2d_bandwidth_gbps: float | None = setting(None, None, number(0, unit="GB/s"),
        "Speed of copies back to the device; needs `--num-host-blocks`", flag="--host-offload-h2d-bandwidth-gbps",
        group=_CACHE, shown="32")

    speedup_ratio: float = setting(1.0, None, number(0),
        "Divides every time; 0: nothing takes time (the native mocker then leaves times as they are)",
        flag="--speedup-ratio", group=_TIME)
    decode_speedup_ratio: float = setting(1.0, None, number(0),
        "Divides the times of decode steps once more; must be 1 with `--ais-nextn`", flag="--decode-speedup-ratio",
        group=_TIME)
    planner_profile_data: Path | None = setting(None, None, _path,
        "Times from a profiler's measurements, an NPZ file or a directory; see [times](mocker.md#times)",
        flag="--planner-profile-data", group=_TIME)
    nextn: int | None = setting(None, None, integer(1, 5),
        "Draft tokens of each decode step: speculative decoding", flag=("--ais-nextn", "--aic-nextn"), dest="nextn",
        group=_TIME)
    accept_rates: tuple[float, ...] | None = setting(None, None, _rates,
        "Chance of each draft token to be accepted, a comma list", dest="accept_rates",
        flag=("--ais-nextn-accept-rates", "--aic-nextn-accept-rates"), group=_TIME, shown="0.85,0.3,0,0,0")
    seed: int = setting(42, None, integer(0),
        "Seed of what is accepted, where worker i has seed + i, and of the token ids, where all have the same", dest="seed",
        flag=("--ais-mtp-seed", "--aic-mtp-seed"), group=_TIME)

    reasoning: str | None = setting(None, None, SettingReader(str, metavar="JSON"),
        "Begin answers with a thought: an object with `start_thinking_token_id`, `end_thinking_token_id` and "
        "`thinking_ratio` (0 to 1)", flag="--reasoning", group=_OUTPUT)
    response_replay_trace_path: str | None = setting(None, None, file_path,
        "Answer requests that carry the annotation `output_replay_id:KEY` from this trace",
        flag="--response-replay-trace-path", group=_OUTPUT)

    zmq_kv_events_ports: tuple[int, ...] | None = setting(None, None, _ports,
        "Publish KV events on ZMQ sockets as vLLM does: one port for each worker, rank r uses port + r",
        flag="--zmq-kv-events-ports", group=_EVENTS)
    zmq_replay_ports: tuple[int, ...] | None = setting(None, None, _ports,
        "Answer questions for missed KV events at these ports, one for each worker", flag="--zmq-replay-ports",
        group=_EVENTS)
    bootstrap_ports: tuple[int, ...] | None = setting(None, None, _ports,
        "Where decode workers wait for the prompts of each prefill worker, one port for each; 0: any free one. Without "
        "it prompts are handed over in the answer", flag="--bootstrap-ports", group=_EVENTS)
    kv_transfer_bandwidth: float | None = setting(None, None, number(0, unit="GB/s"),
        "Speed at which a prefill worker hands its prompt over; 0: it takes no time", flag="--kv-transfer-bandwidth",
        group=_EVENTS, shown="no time")
    kv_transfer_timing_mode: str = setting("full_prompt", None, one_of("full_prompt", "destination_missing"),
        "What is handed over; without bootstrap it is always the full prompt", flag="--kv-transfer-timing-mode",
        group=_EVENTS)
    kv_cache_dtype: str = setting("auto", None, text,
        "Type of the cache, which gives the bytes per token; `auto`: the model's", flag="--kv-cache-dtype",
        group=_EVENTS)
    kv_bytes_per_token: int | None = setting(None, None, integer(0, metavar="BYTES"),
        "Bytes of the cache for one token", flag="--kv-bytes-per-token", group=_EVENTS,
        shown="computed from the model's config.json")

    sglang_schedule_policy: str = setting("fifo", None, _policy,
        "Order of the queue: `fifo`, or `lpm` (longest cached prefix first)", flag="--sglang-schedule-policy",
        group=_SGLANG)
    sglang_max_prefill_tokens: int = setting(16384, None, integer(1, metavar="TOKENS"),
        "Prompt tokens of one pass", flag="--sglang-max-prefill-tokens", group=_SGLANG)
    sglang_chunked_prefill_size: int = setting(8192, None, integer(1, metavar="TOKENS"),
        "Longest chunk of a prompt; a multiple of the block size", flag="--sglang-chunked-prefill-size", group=_SGLANG)
    sglang_clip_max_new_tokens: int = setting(4096, None, integer(1, metavar="TOKENS"),
        "Output of one request that admission reserves memory for, at most", flag="--sglang-clip-max-new-tokens",
        group=_SGLANG)
    sglang_schedule_conservativeness: float = setting(1.0, None, number(0),
        "Scales the memory that admission reserves for running requests", flag="--sglang-schedule-conservativeness",
        group=_SGLANG)
    # fmt: on


REFUSED_FLAGS: Final = (declared(None, switch, "", flag="--sglang-generate", status=Status.REFUSED),)

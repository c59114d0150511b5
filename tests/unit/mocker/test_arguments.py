"""From flags and configuration files to engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import InvalidArgument
from dynamo.mocker.arguments import kv_bytes_per_token, read_arguments
from dynamo.mocker.configuration import read_configuration
from dynamo.mocker.timing import FixedTiming, PolynomialTiming
from dynamo.scheduling import SchedulerOptions

MODEL = ["--model-path", "my-model"]


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        read_arguments(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_defaults_are_the_native_ones() -> None:
    (worker,) = read_arguments(MODEL).workers
    assert worker.options.scheduler == SchedulerOptions()
    assert isinstance(worker.options.timing, PolynomialTiming)
    assert (worker.config.namespace, worker.config.component, worker.config.endpoint) == (
        "dynamo",
        "backend",
        "generate",
    )
    assert (worker.config.model_name, worker.config.served_model_name) == ("my-model", "my-model")


def test_a_name_alone_is_enough() -> None:
    (worker,) = read_arguments(["--model-name", "only-a-name"]).workers
    assert (worker.config.model_name, worker.config.served_model_name) == ("only-a-name", "only-a-name")


def test_sockets_are_open_to_the_network_in_a_cluster_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETCD_ENDPOINTS", raising=False)
    (worker,) = read_arguments(MODEL).workers
    assert worker.options.listen_host == "127.0.0.1"
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://localhost:2379")
    (worker,) = read_arguments([*MODEL, "--discovery-backend", "etcd"]).workers
    assert worker.options.listen_host == "0.0.0.0"


def test_each_backend_has_its_own_block_size() -> None:
    for backend, size in (("vllm", 64), ("sglang", 1), ("trtllm", 32)):
        (worker,) = read_arguments([*MODEL, "--engine-type", backend]).workers
        assert worker.options.scheduler.block_size == size


def test_workers_of_one_process_have_their_own_seeds_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", "8000")
    argv = [*MODEL, "--num-workers", "2", "--zmq-kv-events-ports", "5000,5100", "--zmq-replay-ports", "6000,6100"]
    first, second = read_arguments(argv).workers
    assert (first.seed, second.seed) == (42, 43)
    assert (first.options.zmq_kv_events_port, second.options.zmq_kv_events_port) == (5000, 5100)
    assert (first.options.zmq_replay_port, second.options.zmq_replay_port) == (6000, 6100)
    ports = [each.config.runtime_settings.system.port for each in (first, second) if each.config.runtime_settings]
    assert ports == [8000, 8001]


def test_roles_in_both_forms() -> None:
    for argv in (["--disaggregation-mode", "prefill"], ["--is-prefill-worker"]):
        (worker,) = read_arguments([*MODEL, *argv]).workers
        assert worker.options.scheduler.role == "prefill"
        assert worker.config.component == "prefill"
        assert worker.config.disaggregation_mode is DisaggregationMode.PREFILL
    (decode,) = read_arguments([*MODEL, "--is-decode-worker"]).workers
    assert (decode.config.component, decode.config.enable_local_indexer) == ("backend", False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model-path is needed (a model directory, or any name), or --model-name"),
        ([*MODEL, "--is-prefill-worker", "--disaggregation-mode", "decode"], "give one of them"),
        ([*MODEL, "--is-prefill-worker", "--is-decode-worker"], "give one of them"),
        ([*MODEL, "--disaggregation-mode", "encode"], "no such role"),
        ([*MODEL, "--ais-perf-model"], "aisimulate, which is not public"),
        ([*MODEL, "--aic-system", "h200"], "aisimulate, which is not public"),
        ([*MODEL, "--bootstrap-ports", "1"], "for prefill workers only"),
        ([*MODEL, "--num-host-blocks", "1"], "needs kv_cache_bytes_per_token or kv_transfer_bytes_per_token"),
        ([*MODEL, "--num-host-blocks", "1", "--kv-bytes-per-token", "1", "--engine-type", "sglang"], "backend vllm"),
        (
            [*MODEL, "--num-host-blocks", "1", "--kv-bytes-per-token", "1", "--no-enable-prefix-caching"],
            "prefix_caching",
        ),
        ([*MODEL, "--host-offload-h2d-bandwidth-gbps", "1"], "need --num-host-blocks"),
        ([*MODEL, "--block-size", "1"], "block_size must be an integer of at least 2"),
        ([*MODEL, "--ais-nextn", "2", "--decode-speedup-ratio", "2"], "decode_speedup_ratio must be 1"),
        ([*MODEL, "--num-workers", "2", "--zmq-kv-events-ports", "5000"], "one port for each of the 2 workers"),
        ([*MODEL, "--zmq-replay-ports", "5000"], "needs --zmq-kv-events-ports"),
        ([*MODEL, "--reasoning", "{"], "--reasoning is not JSON"),
        ([*MODEL, "--reasoning", '{"thinking_ratio": 1}'], "reasoning.start_thinking_token_id is missing"),
        ([*MODEL, "--speedup-ratio", "-1"], "-1.0 is below 0"),
        ([*MODEL, "--planner-profile-data", "nowhere.npz"], "prefill_isl"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = refusal(argv, capsys)
    assert said in found
    assert found.count("\n") == 1


def test_stagger_is_chosen_by_the_number_of_workers() -> None:
    seconds = [
        read_arguments([*MODEL, "--stagger-delay", "-1", "--num-workers", str(n)]).stagger_seconds
        for n in (32, 33, 129)
    ]
    assert seconds == [0, 0.1, 0.2]


def test_a_configuration_file_takes_the_place_of_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    timing = {"type": "fixed", "prefill_ms": 3, "decode_ms": 1}
    document = {
        "engine": {
            "backend": "sglang",
            "num_gpu_blocks": 7,
            "timing_model": timing,
            "sglang": {"schedule_policy": "lpm"},
        },
        "dp_size": 2,
        "startup_time": 0.5,
        "dynamo": {"zmq_kv_events_port": 5000},
    }
    file.write_text(json.dumps(document))
    (worker,) = read_arguments([*MODEL, "--num-gpu-blocks-override", "9", "--extra-engine-args", str(file)]).workers
    options = worker.options
    assert (options.scheduler.num_gpu_blocks, options.scheduler.block_size) == (7, 1)
    assert options.scheduler.sglang.schedule_policy == "lpm"
    assert options.timing == FixedTiming(3, 1)
    assert (options.dp_size, options.startup_seconds, options.zmq_kv_events_port) == (2, 0.5, 5000)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"engine": {"zzz": 1}}, r"engine\.zzz: unknown field; known are .*block_size"),
        ({"engin": {}}, "engin: unknown field; known are dp_size"),
        ({"dynamo": {"port": 1}}, r"dynamo\.port: unknown field"),
        ({"engine": {"sglang": {"page": 1}}}, r"engine\.sglang\.page: unknown field"),
        ({"engine": []}, "engine must be an object"),
        ([], "the configuration must be an object"),
        ({"engine": {"num_gpu_blocks": 0}}, r"engine\.num_gpu_blocks must be an integer of at least 1"),
        ({"engine": {"num_gpu_blocks": "7"}}, r"engine\.num_gpu_blocks must be an integer"),
        ({"engine": {"speedup_ratio": -1}}, r"engine\.speedup_ratio must be a finite number"),
        ({"engine": {"backend": "tgi"}}, r"engine\.backend must be one of"),
        ({"engine": {"aic_nextn": 6}}, r"engine\.aic_nextn must be an integer from 1 to 5"),
        ({"engine": {"timing_model": {"type": "x"}}}, r"engine\.timing_model\.type"),
        ({"engine": {"timing_model": {"type": "fixed"}}}, r"engine\.timing_model\.prefill_ms is missing"),
        ({"engine": {"timing_model": {"type": "external", "provider": "ais"}}}, "aisimulate"),
        ({"engine": {"kv_cache_groups": [1]}}, r"engine\.kv_cache_groups is not built"),
        ({"engine": {"native_host_offload": {"num_host_blocks": 1, "scope": "cluster"}}}, r"scope is not built"),
        ({"engine": {"native_host_offload": {}}}, r"native_host_offload\.num_host_blocks is missing"),
        ({"engine": {"native_host_offload": {"num_host_blocks": 0}}}, r"num_host_blocks must be an integer"),
        (
            {
                "engine": {
                    "kv_bytes_per_token": 1,
                    "native_host_offload": {"num_host_blocks": 1, "h2d_bandwidth_gbps": 0},
                }
            },
            "bandwidths above 0",
        ),
        ({"dynamo": {"bootstrap_port": -1}}, r"dynamo\.bootstrap_port must be an integer from 0"),
        ({"dp_size": 0}, "dp_size must be an integer from 1"),
    ],
)
def test_a_mistake_in_a_configuration_names_the_path(document: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        read_configuration(document)


def test_what_is_not_built_may_be_there_at_the_value_that_changes_nothing() -> None:
    read_configuration({"engine": {"prefill_schedule_interval": 1, "kv_cache_groups": None}, "dynamo": {}})


def test_the_bytes_of_a_token_come_from_the_model(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
    for config, dtype, expected in (
        ({**sizes, "torch_dtype": "bfloat16"}, "auto", 256),
        ({"text_config": {**sizes, "torch_dtype": "float32"}}, "auto", 512),
        (sizes, "fp8_e5m2", 128),
        (sizes, "something", 256),
        ({"text_config": {}}, "auto", None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert kv_bytes_per_token(str(tmp_path), dtype) == expected
    assert kv_bytes_per_token("my-model") is None


def test_the_host_tier_knows_how_long_the_copy_of_a_block_takes() -> None:
    argv = [*MODEL, "--num-host-blocks", "100", "--block-size", "16", "--kv-bytes-per-token", "131072"]
    (worker,) = read_arguments([*argv, "--host-offload-d2h-bandwidth-gbps", "16"]).workers
    host = worker.options.scheduler.host
    assert host is not None
    assert host.num_host_blocks == 100
    assert host.to_host_block_ms == pytest.approx(16 * 131_072 / 16e9 * 1000)
    assert host.to_device_block_ms == pytest.approx(16 * 131_072 / 32e9 * 1000)

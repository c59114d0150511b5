import importlib
import json
import logging
import subprocess
import sys

import pytest

import dynamo._core
import dynamo.errors
import dynamo.llm
import dynamo.llm.exceptions
from dynamo._core import MediaDecoder, MediaFetcher, log_message

EXCEPTIONS = (
    "DynamoException Unknown InvalidArgument CannotConnect Disconnected ConnectionTimeout Cancelled EngineShutdown "
    "StreamIncomplete RouterQueueLimitExceeded SelectionServiceError WorkerUnavailable ResponseTimeout HttpError"
)

NAMES = {
    "dynamo._core": "Context ContextMetadata SpanProxy backend ModelInput ModelType WorkerType KvEventPublisher "
    "WorkerMetricsPublisher Endpoint DistributedRuntime Client get_tool_parser_names get_reasoning_parser_names "
    "log_message MediaDecoder MediaFetcher " + EXCEPTIONS,
    "dynamo._core.backend": "Worker WorkerConfig EngineConfig LlmRegistration RuntimeConfig DisaggregationMode "
    "EngineMetrics SnapshotPublisher HEALTH_CHECK_KEY",
    "dynamo.llm": "ModelInput ModelType WorkerType KvEventPublisher WorkerMetricsPublisher register_model "
    "unregister_model fetch_model HttpError register_llm unregister_llm fetch_llm update_model_taints "
    "ModelRuntimeConfig RouterMode",
    "dynamo.llm.exceptions": EXCEPTIONS,
    "dynamo.common.backend": "BaseEngine LLMEngine RawEngine DiffusionEngine EngineConfig LlmRegistration "
    "GenerateRequest GenerateChunk RawRequest RawResponseChunk Worker WorkerConfig telemetry",
    "dynamo.common.backend.engine": "BaseEngine LLMEngine RawEngine DiffusionEngine EngineConfig LlmRegistration "
    "GenerateRequest GenerateChunk RawRequest RawResponseChunk ForcedTokenSequenceSpec PythonProcessorSpec "
    "LogitsProcessorEntry LogitsProcessorSpec is_generation_stage logits_processors_for_request "
    "serialize_logits_processor_entries deserialize_logits_processor_entries",
    "dynamo.common.backend.run": "run _start EngineFactory",
    "dynamo.common.backend.worker": "Worker WorkerConfig _coerce_disagg_mode _to_rust_disaggregation_mode",
    "dynamo.common.backend.publisher": "ZmqSource PushSource ComponentSnapshot KvEventSource",
    "dynamo.common.backend.dp_rank": "forced_dp_rank validate_global_dp_rank",
    "dynamo.common.backend.disagg": "enforce_prefill_max_tokens extract_prefill_result require_prefill_result",
    "dynamo.common.backend.multimodal": "extract_multimodal_kwargs require_encoder_result encoder_terminal_chunk",
    "dynamo.common.backend.logprobs": "parse_logprob_options extract_from_completion_output "
    "extract_prompt_logprobs_from_completion_output extract_prompt_logprobs_from_sglang_meta "
    "build_sglang_logprob_kwargs extract_from_sglang_meta",
    "dynamo.common.backend.metrics": "ensure_prometheus_multiproc_dir gather_with_labels register_engine_registry "
    "register_global_registry",
    "dynamo.common.backend.health_check": "HEALTH_CHECK_KEY bos_token_id_or build_health_check_payload "
    "build_raw_health_check_payload is_probe parse_health_check_payload_cli",
    "dynamo.common.backend.telemetry": "current_span start_span trace_headers engine_trace_kwargs",
    "dynamo.common.backend.agent_context": "agent_context_from_request session_id_from_request",
    "dynamo.common.backend.sample_engine": "SampleLLMEngine",
    "dynamo.common.backend.sample_main": "main",
    "dynamo.common.backend.sample_diffusion_engine": "SampleDiffusionEngine",
    "dynamo.common.backend.sample_diffusion_main": "main",
    "dynamo.common.backend.testing": "run_conformance run_encode_conformance run_raw_conformance mock_context "
    "cancelling_context ConformanceFailure",
    "dynamo.common.constants": "DisaggregationMode EmbeddingTransferMode",
    "dynamo.common.utils.engine_response": "normalize_finish_reason",
    "dynamo.common.utils.structural_tag": "serialize_structural_tag",
    "dynamo.common.utils.token_ids": "token_ids_to_list token_ids_len normalize_request_token_ids",
    "dynamo.health_check": "HealthCheckPayload HEALTH_CHECK_KEY load_health_check_from_env",
    "dynamo.prometheus_names": "name_prefix labels kvstats model_info",
    "dynamo.logits_processing": "BaseLogitsProcessor",
    "dynamo.runtime": "Context DistributedRuntime Client Endpoint dynamo_worker dynamo_endpoint",
    "dynamo.runtime.logging": "configure_dynamo_logging",
}


@pytest.mark.parametrize("path", sorted(NAMES))
def test_every_published_name_is_importable_from_its_path(path: str) -> None:
    module = importlib.import_module(path)
    assert [name for name in NAMES[path].split() if not hasattr(module, name)] == []


def test_the_front_door_exports_the_published_names_and_no_more() -> None:
    assert sorted(importlib.import_module("dynamo.common.backend").__all__) == sorted(
        NAMES["dynamo.common.backend"].split()
    )


@pytest.mark.parametrize("name", EXCEPTIONS.split())
def test_an_exception_is_the_same_class_under_every_name(name: str) -> None:
    assert getattr(dynamo._core, name) is getattr(dynamo.llm.exceptions, name) is getattr(dynamo.errors, name)


def test_the_backend_facade_is_a_module() -> None:
    assert sys.modules["dynamo._core.backend"] is dynamo._core.backend
    assert dynamo._core.backend.DisaggregationMode.Aggregated == 1


def test_importing_the_contract_loads_neither_prometheus_nor_a_server() -> None:
    code = (
        "import sys; from dynamo.common.backend import LLMEngine, EngineConfig, WorkerConfig; "
        "import dynamo.common.backend.metrics; "
        "print([m for m in ('prometheus_client', 'uvicorn', 'torch', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_offers_only_parsers_that_exist() -> None:
    for names in (dynamo._core.get_tool_parser_names(), dynamo._core.get_reasoning_parser_names()):
        assert names == sorted(set(names))
    assert "hermes" in dynamo._core.get_tool_parser_names()
    assert "qwen3" in dynamo._core.get_reasoning_parser_names()


def test_media_settings_are_plain_json() -> None:
    decoder, fetcher = MediaDecoder(), MediaFetcher()
    decoder.enable_image({"limits": {"max_alloc": 1}})
    decoder.enable_video()
    decoder.enable_audio()
    fetcher.timeout_ms(500)
    fetcher.user_agent("me")
    fetcher.allow_direct_ip(False)
    fetcher.allow_direct_port(True)
    fetcher.allowed_media_domains(["b", "a", "b"])
    assert json.loads(json.dumps(decoder)) == {"image": {"limits": {"max_alloc": 1}}, "video": {}, "audio": {}}
    assert json.loads(json.dumps(fetcher)) == {
        "timeout_ms": 500,
        "user_agent": "me",
        "allow_direct_ip": False,
        "allow_direct_port": True,
        "allowed_media_domains": ["a", "b"],
    }
    with pytest.raises(ValueError, match="timeout_ms"):
        fetcher.timeout_ms(0)


@pytest.mark.parametrize(
    ("level", "number"),
    [
        ("trace", 10),
        ("DEBUG", 10),
        ("info", 20),
        ("warn", 30),
        ("warning", 30),
        ("error", 40),
        ("critical", 50),
        ("?", 20),
    ],
)
def test_a_message_is_logged_for_the_place_it_names(level: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="some.module"):
        log_message(level, "50% done", "some.module", "file.py", 7)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage(), record.name) == (number, "50% done", "some.module")
    assert (record.pathname, record.lineno) == ("file.py", 7)


def test_an_error_of_use_of_the_sample_command_is_one_line_and_exit_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.common.backend.sample_main", "--request-plane", "pigeon"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--request-plane" in done.stderr

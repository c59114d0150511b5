import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
from wings import name_in_package, source_files

import dynamo
import dynamo._core
import dynamo.errors
import dynamo.llm
import dynamo.llm.exceptions
from dynamo._core import MediaDecoder, MediaFetcher, log_message
from support.cases import each_case

EXCEPTIONS = (
    "DynamoException Unknown InvalidArgument CannotConnect Disconnected ConnectionTimeout Cancelled EngineShutdown "
    "StreamIncomplete RouterQueueLimitExceeded SelectionServiceError WorkerUnavailable ResponseTimeout HttpError"
)

NAMES = {
    "dynamo._core": "Context ContextMetadata SpanProxy backend ModelInput ModelType WorkerType KvEventPublisher "
    "WorkerMetricsPublisher Endpoint DistributedRuntime Client get_tool_parser_names get_reasoning_parser_names "
    "log_message MediaDecoder MediaFetcher with_engine_data LoRADownloader FpmDirectPublisher FpmEventRelay "
    "FpmEventSubscriber " + EXCEPTIONS,
    "dynamo.common.config_dump": "add_config_dump_args dump_config get_config_dump get_environment_vars register_encoder",
    "dynamo.common.configuration": "ArgGroup ConfigBase add_argument env_or_default add_negatable_bool_argument",
    "dynamo.common.engine_monitor": "EngineHealthMonitorConfig ENGINE_HEALTH_CHECK_INTERVAL "
    "ENGINE_HEALTH_CHECK_INTERVAL_ENV ENGINE_HEALTH_CHECK_TIMEOUT ENGINE_HEALTH_CHECK_TIMEOUT_ENV "
    "ENGINE_HEALTH_SHUTDOWN_TIMEOUT ENGINE_HEALTH_SHUTDOWN_TIMEOUT_ENV",
    "dynamo.common.forward_pass_metrics": "FPM_VERSION UnsupportedFpmVersionError WelfordAccumulator encode decode "
    "ScheduledRequestMetrics QueuedRequestMetrics ForwardPassMetrics",
    "dynamo.common.lora": "LoRAInfo LoRAManager LoRASourceProtocol OnceLock get_lora_manager",
    "dynamo.common.metadata_upload": "MetadataUploader",
    "dynamo.common.model_fetch": "NGC_URI_PREFIX needs_local_model_path fetch_model fetch_model_in_subprocess",
    "dynamo.common.native_offloading": "NATIVE_OFFLOADING_CAPACITY_RUNTIME_KEY native_offloading_capacity "
    "get_native_offloading_capacity_tokens",
    "dynamo.common.rl": "RLAdminValidationError RLRouteRegistry env_bool first_endpoint_response register_rl_routes "
    "require_lora_load_request require_lora_unload_request",
    "dynamo.common.model_taints": "MODEL_TAINT_ROUTE TOPOLOGY_TAINT_PREFIX register_model_taint_route",
    "dynamo.common.token_budget": "TOKEN_BUDGET_RUNTIME_KEY TokenBudget publish_token_budget",
    "dynamo.common.utils.endpoint_types": "parse_endpoint_types",
    "dynamo.common.utils.env": "env_bool",
    "dynamo.common.utils.guided_json": "admits_only_empty_object reject_nonprogressing_guided_json_ref_cycles",
    "dynamo.common.utils.input_params": "InputParamManager resolve_thinking_token_budget",
    "dynamo.common.utils.namespace": "get_worker_namespace",
    "dynamo.common.utils.prometheus": "LLMBackendMetrics gather_with_labels get_prometheus_expfmt "
    "register_engine_metrics_callback",
    "dynamo.common.utils.runtime": "create_runtime parse_endpoint run_async",
    "dynamo._core.backend": "Worker WorkerConfig EngineConfig LlmRegistration RuntimeConfig DisaggregationMode "
    "EngineMetrics SnapshotPublisher HEALTH_CHECK_KEY",
    "dynamo.llm": "ModelInput ModelType WorkerType KvEventPublisher WorkerMetricsPublisher register_model "
    "unregister_model fetch_model HttpError register_llm unregister_llm fetch_llm update_model_taints "
    "ModelRuntimeConfig RouterMode with_engine_data",
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
    "dynamo.common.constants": "DisaggregationMode EmbeddingTransferMode KV_HINT_TRANSFER_CAPABILITY_KEY "
    "KV_HINT_TRANSFER_WORKER_TYPE_RUNTIME_KEY KV_HINT_TRANSFER_SOURCE_CONTROL_ENDPOINTS_RUNTIME_KEY",
    "dynamo.common.memory": "CacheMutation CacheReservation CachedEmbedding MultimodalEmbeddingCacheManager",
    "dynamo.common.multimodal": "AsyncEncoderCache EMBEDDING_RECEIVER_FACTORIES EMBEDDING_SENDER_FACTORIES TransferRequest "
    "LocalEmbeddingReceiver LocalEmbeddingSender NixlReadEmbeddingReceiver NixlReadEmbeddingSender "
    "NixlWriteEmbeddingReceiver NixlWriteEmbeddingSender",
    "dynamo.common.utils.media_decoder": "build_frontend_image_decoder_options enable_frontend_video_decoding",
    "dynamo.common.utils.engine_response": "normalize_finish_reason",
    "dynamo.common.utils.structural_tag": "serialize_structural_tag",
    "dynamo.common.utils.token_ids": "token_ids_to_list token_ids_len normalize_request_token_ids",
    "dynamo.health_check": "HealthCheckPayload HEALTH_CHECK_KEY load_health_check_from_env",
    "dynamo.prometheus_names": "name_prefix labels kvstats model_info",
    "dynamo.logits_processing": "BaseLogitsProcessor",
    "dynamo.runtime": "Context DistributedRuntime Client Endpoint dynamo_worker dynamo_endpoint",
    "dynamo.runtime.logging": "LogHandler VllmColorFormatter configure_dynamo_logging configure_logger "
    "configure_sglang_logging configure_vllm_logging construct_formatter_prefix get_bool_env_var log_level_mapping "
    "python_log_level_mapping",
}


# Every module of the guide's and the native paths, and the room it shows.
FACADES = {
    "dynamo._core": "many rooms",
    "dynamo._core.backend": "many rooms",
    "dynamo.common": "a folder",
    "dynamo.common.absent": "itself",
    "dynamo.common.backend": "dynamo.contract",
    "dynamo.common.backend.agent_context": "dynamo.contract.request_fields",
    "dynamo.common.backend.args": "dynamo.contract.args",
    "dynamo.common.backend.disagg": "dynamo.contract.requests.disaggregation",
    "dynamo.common.backend.dp_rank": "dynamo.contract.requests.dp_rank",
    "dynamo.common.backend.engine": "dynamo.contract.engine",
    "dynamo.common.backend.health_check": "dynamo.contract.health_check",
    "dynamo.common.backend.logprobs": "dynamo.contract.requests.logprobs",
    "dynamo.common.backend.metrics": "dynamo.contract.metrics",
    "dynamo.common.backend.multimodal": "dynamo.contract.requests.multimodal",
    "dynamo.common.backend.publisher": "dynamo.contract.kv_events",
    "dynamo.common.backend.run": "dynamo.worker.run",
    "dynamo.common.backend.sample_diffusion_engine": "dynamo.engines.sample.diffusion_engine",
    "dynamo.common.backend.sample_diffusion_main": "dynamo.engines.sample.diffusion_main",
    "dynamo.common.backend.sample_engine": "dynamo.engines.sample.engine",
    "dynamo.common.backend.sample_main": "dynamo.engines.sample.main",
    "dynamo.common.backend.telemetry": "dynamo.contract.telemetry",
    "dynamo.common.backend.testing": "dynamo.contract.conformance",
    "dynamo.common.backend.worker": "dynamo.worker.worker",
    "dynamo.common.config_dump": "itself",
    "dynamo.common.configuration": "dynamo.contract.flag_declarations",
    "dynamo.common.configuration.arg_group": "dynamo.contract.flag_declarations",
    "dynamo.common.configuration.config_base": "dynamo.contract.flag_declarations",
    "dynamo.common.configuration.utils": "dynamo.contract.flag_declarations",
    "dynamo.common.constants": "itself",
    "dynamo.common.lora": "many rooms",
    "dynamo.common.model_taints": "itself",
    "dynamo.common.token_budget": "itself",
    "dynamo.common.utils": "dynamo.contract.requests",
    "dynamo.common.utils.endpoint_types": "dynamo.contract.lower_level",
    "dynamo.common.utils.engine_response": "dynamo.contract.request_fields",
    "dynamo.common.utils.env": "dynamo.contract.flag_declarations",
    "dynamo.common.utils.graceful_shutdown": "itself",
    "dynamo.common.utils.guided_json": "itself",
    "dynamo.common.utils.input_params": "dynamo.contract.request_fields",
    "dynamo.common.utils.namespace": "dynamo.contract.lower_level",
    "dynamo.common.utils.prometheus": "itself",
    "dynamo.common.utils.runtime": "dynamo.contract.lower_level",
    "dynamo.common.utils.structural_tag": "dynamo.contract.requests.structural_tag",
    "dynamo.common.utils.token_ids": "dynamo.contract.requests.token_ids",
    "dynamo.llm": "many rooms",
    "dynamo.llm.exceptions": "dynamo.errors",
}
SNAPSHOT = "constants lifecycle restore_context running"
LIGHT = "_version engine_monitor forward_pass_metrics lora.downloader lora.manager lora.once_lock metadata_upload model_fetch native_offloading rl"
FACADES |= dict.fromkeys([f"dynamo.common.{name}" for name in LIGHT.split()], "itself")
MEDIA = "memory.embedding_cache multimodal.decoded_media multimodal.embedding_transfer multimodal.encoder_cache "
MEDIA += "multimodal.mm_kwargs_shm utils.media_decoder"
FACADES |= dict.fromkeys([f"dynamo.common.{name}" for name in MEDIA.split()], "itself")
FACADES |= dict.fromkeys(["dynamo.common.memory", "dynamo.common.multimodal"], "a folder")
FACADES |= dict.fromkeys([f"dynamo.common.snapshot.{name}" for name in SNAPSHOT.split()], "itself")
FACADES["dynamo.common.snapshot"] = "a folder"


def test_every_module_of_the_guides_paths_is_in_the_list() -> None:
    found = set()
    for folder in ("common", "llm", "_core"):
        for path in source_files(folder):
            parts = ("dynamo", *Path(name_in_package(path)).with_suffix("").parts)
            found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert found == set(FACADES)


@each_case(("path", "room"), [(p, r) for p, r in FACADES.items() if r.startswith("dynamo.")])
def test_a_facade_defines_nothing_of_its_own(path: str, room: str) -> None:
    facade, origin = importlib.import_module(path), importlib.import_module(room)
    if facade is origin:
        return
    names = [name for name in getattr(facade, "__all__", ()) if name != "telemetry"]
    assert names
    for name in names:
        found = getattr(facade, name)
        assert getattr(found, "__module__", None) != path, f"{path}.{name} is defined in a facade"
    if not hasattr(origin, "__path__"):
        assert [name for name in names if getattr(origin, name) is not getattr(facade, name)] == []


@each_case("path", sorted(NAMES))
def test_every_published_name_is_importable_from_its_path(path: str) -> None:
    module = importlib.import_module(path)
    assert [name for name in NAMES[path].split() if not hasattr(module, name)] == []


def test_the_front_door_exports_the_published_names_and_no_more() -> None:
    assert sorted(importlib.import_module("dynamo.common.backend").__all__) == sorted(
        NAMES["dynamo.common.backend"].split()
    )


@each_case("name", EXCEPTIONS.split())
def test_an_exception_is_the_same_class_under_every_name(name: str) -> None:
    assert getattr(dynamo._core, name) is getattr(dynamo.llm.exceptions, name) is getattr(dynamo.errors, name)


def test_the_backend_facade_is_a_module() -> None:
    assert sys.modules["dynamo._core.backend"] is dynamo._core.backend
    assert dynamo._core.backend.DisaggregationMode.Aggregated == 1


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
        "timeout": {"secs": 0, "nanos": 500_000_000},
        "user_agent": "me",
        "allow_direct_ip": False,
        "allow_direct_port": True,
        "allowed_media_domains": ["a", "b"],
    }
    with pytest.raises(ValueError, match="timeout_ms"):
        fetcher.timeout_ms(0)
    with pytest.raises(ValueError, match="'fps'"):
        decoder.enable_image({"fps": 1})
    with pytest.raises(ValueError, match="'max_width'"):
        decoder.enable_video({"limits": {"max_width": 1}})


@each_case(
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

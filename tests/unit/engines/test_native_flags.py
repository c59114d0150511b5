"""Every flag that 1.6.1's workers have works or is refused by name with what to write instead."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import pytest

from dynamo.engines.callable.engine import engine_class
from dynamo.engines.native_flags import NATIVE_FLAGS, SGLANG, TRTLLM, VLLM, without_native_flags
from dynamo.engines.sample.diffusion_engine import SampleDiffusionEngine
from dynamo.engines.sample.engine import SampleLLMEngine
from dynamo.engines.sample.speech_engine import SampleSpeechEngine
from dynamo.errors import InvalidArgument
from dynamo.llamacpp import arguments as llamacpp
from dynamo.mocker import arguments as mocker
from dynamo.reference import flags as reference
from dynamo.sglang import arguments as sglang
from dynamo.transformers import arguments as transformers
from dynamo.trtllm import arguments as trtllm
from dynamo.upstream import arguments as upstream
from dynamo.vllm import arguments as vllm
from support.cases import each_case

# As 1.6.1's parsers declare them.
COMMON = [
    "--version",
    "--enable-multimodal",
    "--no-enable-multimodal",
    "--frontend-decoding",
    "--no-frontend-decoding",
    "--namespace",
    "--endpoint",
    "--kv-state-endpoint",
    "--discovery-backend",
    "--request-plane",
    "--response-plane",
    "--event-plane",
    "--fpm-trace",
    "--no-fpm-trace",
    "--connector",
    "--dyn-tool-call-parser",
    "--dyn-reasoning-parser",
    "--dyn-default-thinking-mode",
    "--exclude-tools-when-tool-choice-none",
    "--no-exclude-tools-when-tool-choice-none",
    "--dyn-enable-structural-tag",
    "--no-dyn-enable-structural-tag",
    "--dyn-structural-tag-scope",
    "--dyn-structural-tag-schema",
    "--dyn-structural-tag",
    "--custom-jinja-template",
    "--endpoint-types",
    "--dyn-endpoint-types",
    "--dump-config-to",
    "--multimodal-embedding-cache-capacity-gb",
    "--multimodal-embedding-cache-publisher",
    "--no-multimodal-embedding-cache-publisher",
    "--output-modalities",
    "--media-output-fs-url",
    "--media-output-http-url",
    "--health-check-payload",
    "--engine-request-limit",
    "--tcp-tls-cert-path",
    "--tcp-tls-key-path",
    "--tcp-tls-ca-cert-path",
    "--tcp-tls-insecure",
    "--no-tcp-tls-insecure",
    "--tcp-tls-server-name",
    "--tcp-tls-handshake-timeout",
    "--tcp-tls-client-cert-path",
    "--tcp-tls-client-key-path",
    "--tcp-tls-client-ca-cert-path",
    "--nats-tls-ca-cert-path",
    "--nats-tls-insecure",
    "--no-nats-tls-insecure",
    "--nats-tls-client-cert-path",
    "--nats-tls-client-key-path",
]
OF = {
    VLLM: [
        "--disaggregation-mode",
        "--use-vllm-tokenizer",
        "--no-use-vllm-tokenizer",
        "--route-to-encoder",
        "--no-route-to-encoder",
        "--enable-rl",
        "--no-enable-rl",
        "--mm-prompt-template",
        "--custom-encoder-class",
        "--embedding-transfer-mode",
        "--embedding-worker",
        "--no-embedding-worker",
        "--embedding-frontend-tokenization",
        "--no-embedding-frontend-tokenization",
        "--embedding-worker-processes",
        "--realtime",
        "--no-realtime",
        "--classify-worker",
        "--no-classify-worker",
        "--headless",
        "--no-headless",
        "--model-express-url",
        "--gms-shadow-mode",
        "--no-gms-shadow-mode",
        "--benchmark-mode",
        "--benchmark-points-file",
        "--prefill-max-new-token-samples",
        "--prefill-max-kv-read-token-samples",
        "--decode-max-kv-read-token-samples",
        "--decode-max-batch-size-samples",
        "--prefix-max-batch-size-samples",
        "--benchmark-prefill-granularity",
        "--benchmark-prefill-kv-read-granularity",
        "--benchmark-prefill-batch-granularity",
        "--benchmark-decode-length-granularity",
        "--benchmark-decode-batch-granularity",
        "--benchmark-randomize-kda-state",
        "--no-benchmark-randomize-kda-state",
        "--benchmark-hybrid-live-state",
        "--no-benchmark-hybrid-live-state",
        "--benchmark-warmup-iterations",
        "--benchmark-output-path",
        "--benchmark-collect-imbalanced",
        "--no-benchmark-collect-imbalanced",
        "--benchmark-timeout",
        "--benchmark-max-batch-size",
    ],
    SGLANG: [
        "--use-sglang-tokenizer",
        "--no-use-sglang-tokenizer",
        "--gateway-workers",
        "--dedicated-mm-encoder",
        "--no-dedicated-mm-encoder",
        "--embedding-transfer-mode",
        "--embedding-worker",
        "--no-embedding-worker",
        "--rerank-worker",
        "--no-rerank-worker",
        "--image-diffusion-worker",
        "--no-image-diffusion-worker",
        "--disagg-config",
        "--disagg-config-key",
        "--video-generation-worker",
        "--no-video-generation-worker",
        "--enable-rl",
        "--no-enable-rl",
        "--engine-route",
        "--sglang-trace-level",
    ],
    TRTLLM: [
        "--model",
        "--model-path",
        "--served-model-name",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--expert-parallel-size",
        "--enable-attention-dp",
        "--no-enable-attention-dp",
        "--conversation-affinity",
        "--no-conversation-affinity",
        "--conversation-affinity-dp-rank-source",
        "--kv-block-size",
        "--gpus-per-node",
        "--max-batch-size",
        "--max-num-tokens",
        "--max-seq-len",
        "--max-beam-width",
        "--free-gpu-memory-fraction",
        "--extra-engine-args",
        "--override-engine-args",
        "--publish-kv-events",
        "--no-publish-kv-events",
        "--publish-metrics",
        "--no-publish-metrics",
        "--load-format",
        "--model-loader-extra-config",
        "--disaggregation-mode",
        "--modality",
        "--encode-endpoint",
        "--allowed-local-media-path",
        "--max-file-size-mb",
        "--guided-decoding-backend",
        "--quant-algo",
        "--quant-dynamic",
        "--no-quant-dynamic",
        "--enable-teacache",
        "--no-enable-teacache",
        "--teacache-use-ret-steps",
        "--no-teacache-use-ret-steps",
        "--teacache-thresh",
        "--torch-dtype",
        "--revision",
        "--disable-torch-compile",
        "--no-disable-torch-compile",
        "--enable-fullgraph",
        "--no-enable-fullgraph",
        "--enable-cuda-graph",
        "--no-enable-cuda-graph",
        "--attn-backend",
        "--dit-ulysses-size",
        "--dit-ring-size",
        "--dit-cfg-size",
        "--enable-layerwise-nvtx-marker",
        "--no-enable-layerwise-nvtx-marker",
        "--skip-warmup",
        "--no-skip-warmup",
        "--default-height",
        "--default-width",
        "--default-num-inference-steps",
        "--default-guidance-scale",
        "--default-num-frames",
        "--default-num-images-per-prompt",
    ],
}
PARSERS = {VLLM: vllm._own_parser, SGLANG: sglang._own_parser, TRTLLM: trtllm._parser}


@each_case("program", list(OF))
def test_a_native_flag_works_or_is_refused_with_what_to_write(program: str) -> None:
    works = PARSERS[program]()._option_string_actions
    for flag in [*COMMON, *OF[program]]:
        try:
            kept = without_native_flags(program, [flag])
        except InvalidArgument as error:
            kept, refusal = [], str(error)
        else:
            refusal = f"{flag}: "
        assert refusal.startswith(f"{flag}: "), flag
        assert kept == [] or flag in works, f"{flag} of {program} neither works nor is refused"


@each_case("program", list(OF))
def test_each_flag_stands_once_in_the_table(program: str) -> None:
    names = [each.name for each in NATIVE_FLAGS if program in each.programs]
    assert len(names) == len(set(names))


def test_a_refusal_is_by_the_whole_name_and_a_switch_that_is_off_is_dropped() -> None:
    assert without_native_flags(VLLM, ["--model", "m", "--no-headless", "--seed=1"]) == ["--model", "m", "--seed=1"]
    assert without_native_flags(SGLANG, ["--headless"]) == ["--headless"]  # SGLang's parser refuses it
    with pytest.raises(InvalidArgument, match=r"^--benchmark-mode: measure with dynamo bench$"):
        without_native_flags(VLLM, ["--benchmark-mode=agg"])


@each_case(
    ("program", "read"),
    [(VLLM, vllm.read_arguments), (SGLANG, sglang.read_arguments), (TRTLLM, trtllm.read_arguments)],
)
def test_the_version_needs_no_engine(program: str, read: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read(["--version"])  # type: ignore[operator]
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{program} (dynamo-unified {version('dynamo-unified')})\n"


def backwards(messages: list[Any]) -> str:
    return str(messages[-1])[::-1]


@each_case("flag", ["--media-output-fs-url=file:///m", "--media-output-http-url=http://m", "--output-modalities=image"])
def test_where_media_are_kept_is_no_affair_of_an_engine_and_the_flags_say_so(flag: str) -> None:
    refusal = rf"^{flag.partition('=')[0]}: "
    for program in (VLLM, SGLANG, TRTLLM):
        with pytest.raises(InvalidArgument, match=refusal):
            without_native_flags(program, [flag])
    for read in (transformers.read_arguments, llamacpp.read_arguments, upstream.read_arguments):
        with pytest.raises(InvalidArgument, match=refusal):
            read([flag])
    for engine in (SampleLLMEngine, SampleDiffusionEngine, SampleSpeechEngine, engine_class(backwards)):
        with pytest.raises(InvalidArgument, match=refusal):
            asyncio.run(engine.from_args([flag]))


@each_case("read", [reference.read_arguments, mocker.read_arguments])
def test_a_worker_without_a_gpu_says_so_in_one_line(read: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--media-output-fs-url", "file:///m"])
    assert "error: --media-output-fs-url: what engines make is kept by the frontend" in capsys.readouterr().err

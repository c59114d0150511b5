"""Flags of the native workers that mean nothing here: each is refused by name, with what to write instead.

One table for `dynamo.vllm`, `dynamo.sglang` and `dynamo.trtllm`. The native flags that work are not in it: they are of
`add_backend_arguments` or of the engine's own parser.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.settings.extras import DISTRIBUTION

__all__ = [
    "NATIVE_FLAGS",
    "SGLANG",
    "TRTLLM",
    "VLLM",
    "NativeFlag",
    "add_version",
    "refuse_media_output",
    "without_native_flags",
]

VLLM: Final = "dynamo.vllm"
SGLANG: Final = "dynamo.sglang"
TRTLLM: Final = "dynamo.trtllm"
_ALL: Final = (VLLM, SGLANG, TRTLLM)


@dataclass(frozen=True, slots=True)
class NativeFlag:
    """One flag, the native workers that have it, and what takes its place."""

    name: str
    programs: tuple[str, ...]
    instead: str
    is_switch: bool = False  # it has a `--no-` form, which names the default and is dropped


def _flags(programs: Iterable[str], instead: str, *names: str, is_switch: bool = False) -> Iterator[NativeFlag]:
    for name in names:
        yield NativeFlag(f"--{name}", tuple(programs), instead, is_switch)


_NO_MEDIA: Final = "images, audio and video are not built for this engine; the reference engine takes images"
_NO_DIFFUSION: Final = "diffusion is not built for this engine; write a RawEngine (docs/made-media.md)"
_MEASURE: Final = "measure with dynamo bench"
_OVERRIDE: Final = "write --override-engine-args with a JSON object of the engine's own arguments"

_KEPT_BY_FRONTENDS: Final = "what engines make is kept by the frontend: start that with --media-store, and DYN_MEDIA_OUTPUT_HTTP_URL for its links"
_MEDIA_OUTPUT: Final = (
    *_flags(_ALL, _KEPT_BY_FRONTENDS, "media-output-fs-url", "media-output-http-url"),
    *_flags(_ALL, "what an engine makes is its own affair, see --endpoint-types; leave it out", "output-modalities"),
)

NATIVE_FLAGS: Final[tuple[NativeFlag, ...]] = (
    *_MEDIA_OUTPUT,
    # vLLM
    *_flags([VLLM], "the frontend tokenizes", "use-vllm-tokenizer", is_switch=True),
    *_flags([SGLANG], "the frontend tokenizes", "use-sglang-tokenizer", is_switch=True),
    *_flags([SGLANG], "SGLang then ignores constraints and min_tokens; leave it out", "skip-tokenizer-init"),
    *_flags(_ALL, _NO_MEDIA, "enable-multimodal", "frontend-decoding", is_switch=True),
    *_flags(_ALL, _NO_MEDIA, "multimodal-embedding-cache-publisher", is_switch=True),
    *_flags([VLLM], _NO_MEDIA, "mm-prompt-template", "custom-encoder-class"),
    *_flags([VLLM, SGLANG], _NO_MEDIA, "embedding-transfer-mode"),
    *_flags([SGLANG], _NO_MEDIA, "dedicated-mm-encoder", is_switch=True),
    *_flags([TRTLLM], _NO_MEDIA, "modality", "encode-endpoint", "allowed-local-media-path", "max-file-size-mb"),
    *_flags([VLLM], "the frontend always tokenizes inputs of embeddings; leave it out",
            "embedding-frontend-tokenization", is_switch=True),
    *_flags([VLLM], "start several workers instead", "embedding-worker-processes"),
    *_flags([SGLANG], "start several workers instead", "gateway-workers"),
    *_flags([VLLM], "speech workers are not built", "realtime", is_switch=True),
    *_flags([VLLM], "classification workers are not built", "classify-worker", is_switch=True),
    *_flags([SGLANG], "rerank workers are not built for SGLang",
            "rerank-worker", is_switch=True),
    *_flags([SGLANG], _NO_DIFFUSION, "image-diffusion-worker", "video-generation-worker", is_switch=True),
    *_flags([VLLM], "secondary nodes of one engine are not built; start vLLM's own on them",
            "headless", is_switch=True),
    *_flags([VLLM], "weights are read from --model; there is no ModelExpress", "model-express-url"),
    *_flags([VLLM], "shadow engines are not built; start a second worker", "gms-shadow-mode", is_switch=True),
    *_flags(
        [VLLM], _MEASURE,
        "benchmark-mode", "benchmark-points-file", "prefill-max-new-token-samples", "prefill-max-kv-read-token-samples",
        "decode-max-kv-read-token-samples", "decode-max-batch-size-samples", "prefix-max-batch-size-samples",
        "benchmark-prefill-granularity", "benchmark-prefill-kv-read-granularity", "benchmark-prefill-batch-granularity",
        "benchmark-decode-length-granularity", "benchmark-decode-batch-granularity", "benchmark-warmup-iterations",
        "benchmark-output-path", "benchmark-timeout", "benchmark-max-batch-size",
    ),
    *_flags([VLLM], _MEASURE, "benchmark-randomize-kda-state", "benchmark-hybrid-live-state",
            "benchmark-collect-imbalanced", is_switch=True),
    # SGLang
    *_flags([SGLANG], "prefill and decode on different workers are not built for SGLang",
            "disagg-config", "disagg-config-key"),
    *_flags([SGLANG], "routes of the engine's own methods are not built; override supported_controls() of an engine",
            "engine-route"),
    *_flags([SGLANG], "spans are those of docs/tracing.md; leave it out", "sglang-trace-level"),
    # TensorRT-LLM
    *_flags([TRTLLM], "KV events are not built for TensorRT-LLM; routers spread by load",
            "publish-kv-events", "publish-events-and-metrics", is_switch=True),
    *_flags([TRTLLM], "metrics of the engine are not published; those of the worker are at /metrics",
            "publish-metrics", is_switch=True),
    *_flags([TRTLLM], "ranks are chosen by the engine; a frontend keeps sessions at a worker with "
            "--router-session-affinity-ttl-secs", "conversation-affinity", is_switch=True),
    *_flags([TRTLLM], "ranks are chosen by the engine; leave it out", "conversation-affinity-dp-rank-source"),
    *_flags([TRTLLM], _OVERRIDE, "gpus-per-node", "load-format", "model-loader-extra-config", "revision"),
    *_flags(
        [TRTLLM], _NO_DIFFUSION,
        "quant-algo", "teacache-thresh", "torch-dtype", "attn-backend", "dit-ulysses-size", "dit-ring-size",
        "dit-cfg-size", "default-height", "default-width", "default-num-inference-steps", "default-guidance-scale",
        "default-num-frames", "default-num-images-per-prompt",
    ),
    *_flags([TRTLLM], _NO_DIFFUSION, "quant-dynamic", "enable-teacache", "teacache-use-ret-steps",
            "disable-torch-compile", "enable-fullgraph", "enable-cuda-graph", "enable-layerwise-nvtx-marker",
            "skip-warmup", is_switch=True),
    # all three
    *_flags(_ALL, "set DYN_TCP_HANDSHAKE_TIMEOUT_SECS", "tcp-tls-handshake-timeout"),
)  # fmt: skip
"""Every native flag of 1.6.1 that has no effect here."""

_DROPPED: Final = {  # the `--no-` form of switches that work: they are off unless they are given
    VLLM: frozenset({"--no-embedding-worker"}),
    SGLANG: frozenset({"--no-embedding-worker"}),
    TRTLLM: frozenset({"--no-enable-attention-dp"}),
}


def without_native_flags(program: str, words: Sequence[str]) -> list[str]:
    """Return a command line without the `--no-` forms that name the default.

    Raises InvalidArgument that names a flag without effect and has what to write instead.
    """
    refused = {each.name: each for each in NATIVE_FLAGS if program in each.programs}
    dropped = _DROPPED[program] | {f"--no-{each.name[2:]}" for each in refused.values() if each.is_switch}
    kept = []
    for word in words:
        flag = word.partition("=")[0]
        if flag in refused:
            raise InvalidArgument(f"{flag}: {refused[flag].instead}")
        if flag not in dropped:
            kept.append(word)
    return kept


def refuse_media_output(words: Sequence[str] | None) -> None:
    """Raise InvalidArgument for a flag of what is made and where it is kept: every worker takes it, for engines that read it.

    The variables of the same meaning are not refused: a frontend in the same environment reads them.
    """
    refused = {each.name: each.instead for each in _MEDIA_OUTPUT}
    for word in sys.argv[1:] if words is None else words:
        flag = word.partition("=")[0]
        if flag in refused:
            raise InvalidArgument(f"{flag}: {refused[flag]}")


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the program and the version of this package."""
    try:
        found = version(DISTRIBUTION)
    except PackageNotFoundError:  # run from its source, without an installation
        found = "unknown"
    parser.add_argument("--version", action="version", version=f"{parser.prog} ({DISTRIBUTION} {found})")

"""The command line: the flags that every worker has, and those that become arguments of TensorRT-LLM's `LLM`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.engines.adapter import refuse_roles
from dynamo.engines.native_flags import TRTLLM, add_version, without_native_flags
from dynamo.errors import InvalidArgument
from dynamo.worker.hub import served_name

PROGRAM: Final = TRTLLM
MARK: Final = "not yet run on hardware: written from TensorRT-LLM 1.2's API, and tested against a stand-in for it"


@dataclass(frozen=True, slots=True)
class TrtllmArguments:
    """A command line, read."""

    model: str
    served_name: str
    kv_block_size: int
    max_batch_size: int | None
    max_num_tokens: int | None
    max_seq_len: int | None
    engine: dict[str, Any]  # further arguments of `LLM`, plain values
    free_gpu_memory_fraction: float
    embeds: bool = False


def read_arguments(argv: Sequence[str] | None = None) -> tuple[TrtllmArguments, WorkerConfig]:
    """Read a command line. Leaves as argparse does for `--help` and mistakes.

    Raises InvalidArgument for a missing package, for what is not built, and for files and JSON that cannot be read.
    """
    args = _parser().parse_args(without_native_flags(PROGRAM, sys.argv[1:] if argv is None else argv))
    refuse_roles(args, "TensorRT-LLM")
    if args.max_beam_width != 1:
        raise InvalidArgument("--max-beam-width must be 1: beam search is not built for TensorRT-LLM")
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise InvalidArgument(
            "TensorRT-LLM is not installed in this environment: pip install tensorrt-llm (needs a GPU)"
        )
    name = args.served_model_name or served_name(args.model)
    arguments = TrtllmArguments(
        model=args.model,
        served_name=name,
        kv_block_size=args.kv_block_size,
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=args.max_seq_len,
        engine=_engine_arguments(args),
        free_gpu_memory_fraction=args.free_gpu_memory_fraction,
    )
    worker = worker_config_from(args, model_name=args.model, served_model_name=name, enable_kv_routing=False)
    return arguments, worker


def _engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return arguments of `LLM`. The values of `--override-engine-args` go before the YAML file, and that before the flags."""
    found: dict[str, Any] = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "moe_expert_parallel_size": args.expert_parallel_size,
        "enable_attention_dp": args.enable_attention_dp,
        "max_batch_size": args.max_batch_size,
        "max_num_tokens": args.max_num_tokens,
        "max_seq_len": args.max_seq_len,
        "guided_decoding_backend": args.guided_decoding_backend,
    }
    found = {name: value for name, value in found.items() if value is not None}
    if args.extra_engine_args:
        found |= _mapping("--extra-engine-args", _read_yaml(args.extra_engine_args))
    if args.override_engine_args:
        try:
            found |= _mapping("--override-engine-args", json.loads(args.override_engine_args))
        except ValueError as error:
            raise InvalidArgument(f"--override-engine-args is not JSON: {error}") from error
    return found


def _read_yaml(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"--extra-engine-args {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # the last three: of what it holds
        raise InvalidArgument(f"--extra-engine-args {path} is not YAML: {error}") from error


def _mapping(flag: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{flag} must hold an object, got {type(value).__name__}")
    return value


def _parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(PROGRAM, description=f"TensorRT-LLM: {MARK}.")
    add_version(parser)
    add = parser.add_argument_group("TensorRT-LLM engine").add_argument
    add(
        "--model",
        "--model-path",
        "--model-name",
        required=True,
        metavar="DIR",
        help="directory, or hub:NAME to fetch it",
    )
    add("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    add("--tensor-parallel-size", type=int, metavar="N", help="GPUs that share each layer")
    add("--pipeline-parallel-size", type=int, metavar="N", help="GPUs that share the layers")
    add("--expert-parallel-size", type=int, metavar="N", help="GPUs that share the experts")
    add("--enable-attention-dp", action="store_true", default=None, help="attention in data parallel")
    add("--kv-block-size", type=int, default=32, metavar="TOKENS", help="tokens per KV block (default: 32)")
    add("--max-batch-size", type=int, metavar="N", help="requests in one step")
    add("--max-num-tokens", type=int, metavar="N", help="tokens in one step")
    add("--max-seq-len", type=int, metavar="TOKENS", help="longest prompt and answer (default: the model's)")
    add("--max-beam-width", type=int, default=1, metavar="N", help="1: beam search is not built")
    add("--free-gpu-memory-fraction", type=float, default=0.9, metavar="F", help="of free memory for KV blocks (0.9)")
    add(
        "--guided-decoding-backend",
        default="xgrammar",
        metavar="NAME",
        help="xgrammar or llguidance (default: xgrammar)",
    )
    add("--extra-engine-args", metavar="FILE", help="further arguments of `LLM`, a YAML file")
    add("--override-engine-args", metavar="JSON", help="further arguments of `LLM`, which win over all others")
    add_backend_arguments(parser)
    return parser

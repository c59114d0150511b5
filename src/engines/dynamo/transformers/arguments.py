"""The command line: the flags that every worker has, and those of this engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.requests.pooling import MODES
from dynamo.engines.adapter import positive, refuse_roles
from dynamo.engines.native_flags import refuse_media_output
from dynamo.errors import InvalidArgument
from dynamo.settings.extras import install_command
from dynamo.worker.hub import served_name

PROGRAM: Final = "dynamo.transformers"
PACKAGES: Final = ("torch", "transformers")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
PAGE: Final = 32  # tokens of a block: transformers' own 256 would share no prefix that is shorter
CACHE_MB: Final = 1024
VECTORS: Final = "embedding"


@dataclass(frozen=True, slots=True)
class TransformersArguments:
    """A command line, read."""

    model: str
    served_name: str
    device: str  # auto, cpu, cuda, cuda:1, mps
    dtype: str
    context_length: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_mb: int | None  # None: on a GPU what is free
    trust_remote_code: bool
    embeds: bool = False  # makes vectors, and generates nothing
    pooling: str | None = None  # of the states of an input; None: as the model's files have it


def read_arguments(argv: Sequence[str] | None = None) -> tuple[TransformersArguments, WorkerConfig]:
    """Read a command line. Leaves as argparse does for `--help` and mistakes.

    Raises InvalidArgument for a missing package and for what is not built.
    """
    refuse_media_output(argv)
    args = _parser().parse_args(argv)
    refuse_roles(args, "transformers")
    check_installed()
    name = args.served_model_name or served_name(args.model)
    arguments = TransformersArguments(
        model=args.model,
        served_name=name,
        device=args.device,
        dtype=args.dtype,
        context_length=args.context_length,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_cache_mb=args.kv_cache_mb,
        trust_remote_code=args.trust_remote_code,
        embeds=args.embedding_worker,
        pooling=args.pooling,
    )
    worker = worker_config_from(
        args,
        model_name=args.model,
        served_model_name=name,
        enable_kv_routing=False,
        endpoint_types=VECTORS if args.embedding_worker else args.endpoint_types,
    )
    return arguments, worker


def check_installed() -> None:
    """Raise InvalidArgument with the command that installs what is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(
            f"transformers cannot serve without the package {' and '.join(missing)}: "
            + install_command("transformers", "guided")
        )


def _parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(PROGRAM, description="transformers: serves the directory of a Hugging Face model.")
    add = parser.add_argument_group("transformers").add_argument
    add("--model", "--model-name", required=True, metavar="DIR", help="directory of the model, or hub:NAME to fetch it")
    add(
        "--served-model-name", metavar="NAME", help="name clients use (default: the directory's, or the one on the hub)"
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps (default: a GPU where there is one)")
    add("--dtype", choices=DTYPES, help="of the weights (default: the model's, on a CPU float32)")
    add("--context-length", type=positive, metavar="TOKENS", help="longest prompt and answer (default: the model's)")
    add("--max-num-seqs", type=positive, default=64, metavar="N", help="requests in one step (default: 64)")
    add(
        "--max-num-batched-tokens",
        type=positive,
        default=2048,
        metavar="TOKENS",
        help="tokens in one step (default: 2048)",
    )
    add("--block-size", type=positive, default=PAGE, metavar="TOKENS", help=f"tokens per KV block (default: {PAGE})")
    add(
        "--kv-cache-mb",
        type=positive,
        metavar="MB",
        help=f"memory of the KV cache (default: what is free on a GPU, else {CACHE_MB})",
    )
    add("--embedding-worker", action="store_true", help="make embeddings: /v1/embeddings, and no answers")
    add(
        "--pooling",
        choices=MODES,
        help="how an input's states become its vector (default: as the model's files say, else the last one of a model "
        "that generates, and the mean)",
    )
    add("--trust-remote-code", action="store_true", help="run Python code that the model's directory holds")
    add_backend_arguments(parser)
    return parser

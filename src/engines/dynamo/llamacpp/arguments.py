"""The command line: the flags that every worker has, a few of this engine, and any parameter of llama.cpp by its name."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import DEFAULT_ENDPOINT_TYPES, WorkerConfig
from dynamo.engines.adapter import positive, refuse_roles
from dynamo.engines.native_flags import refuse_media_output
from dynamo.errors import InvalidArgument
from dynamo.llamacpp.gguf_header import GgufHeader, read_gguf_header
from dynamo.llamacpp.gguf_tokenizer import tokenizer_of
from dynamo.protocol.model_types import ModelInput
from dynamo.settings.extras import install_command

if TYPE_CHECKING:
    from dynamo.llamacpp.engine import LlamaCppEngine, LlamaCppTextEngine

PROGRAM: Final = "dynamo.llamacpp"
SLOTS: Final = 4
CONTEXT: Final = 8192  # tokens of one request, where the model was trained for more: each slot has memory for so many
UNKNOWN_CONTEXT: Final = 4096  # tokens, where neither flag nor file gives it
LAST_TOKEN: Final = 3  # llama.cpp's number of the pooling
VECTORS: Final = "embedding"
_EPILOG: Final = """\
The frontend tokenizes, with all that follows from it: tool calls, reasoning, stop strings, guided decoding, streams that go on
when a worker dies. The tokenizer is that of --tokenizer DIR, else the tokenizer.json beside the GGUF file, else the file's own,
where its rule is known here (docs/engines.md). Where there is none, llama.cpp tokenizes, and does the rest by the template in
the file; --engine llamacpp-text of `dynamo serve` asks for that.
"""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LlamaArguments:
    """A command line, read."""

    file: Path
    header: GgufHeader
    tokenizer: Path | None  # directory of tokenizer.json; None: llama.cpp tokenizes
    served_name: str
    context_length: int  # tokens of prompt and answer of one request
    slots: int  # requests at a time
    embeds: bool = False  # makes vectors, and generates nothing
    aliases: tuple[str, ...] = ()  # further names of the model
    parameters: dict[str, Any] = field(default_factory=dict)  # of llama.cpp, by name

    @property
    def model(self) -> str:
        """What is served: a file."""
        return str(self.file)

    @property
    def settings(self) -> dict[str, Any]:
        """What llama.cpp is started with."""
        return {
            "model.path": str(self.file),
            "n_ctx": self.context_length * self.slots,
            "n_parallel": self.slots,
            "ctx_shift": False,  # an answer ends at the context, and never forgets its beginning
            "warmup": False,
            "fit_params": False,  # the context is what was promised to the router, or the start fails
            "verbosity": 1,
            "n_threads_http": self.slots + 4,
            "endpoint_metrics": True,
            **(self._of_vectors if self.embeds else {}),
            **self.parameters,
        }

    @property
    def _of_vectors(self) -> dict[str, Any]:
        """A vector is made in one physical batch, so that is as long as an input; generators are pooled by the last token."""
        batch = {"embedding": True, "n_batch": self.context_length, "n_ubatch": self.context_length}
        return batch if self.header.has_pooling else {**batch, "pooling_type": LAST_TOKEN}


def choose_engine(argv: Sequence[str] | None = None) -> type[LlamaCppEngine] | type[LlamaCppTextEngine]:
    """Return the engine for a command line: tokens where the model's tokenizer is at hand, else text."""
    from dynamo.llamacpp.engine import LlamaCppEngine, LlamaCppTextEngine

    args = _parser().parse_args(argv)
    file = _file(args)
    return LlamaCppTextEngine if _tokenizer(args.tokenizer, file) is None else LlamaCppEngine


def read_arguments(
    argv: Sequence[str] | None = None, *, model_input: ModelInput = ModelInput.Tokens
) -> tuple[LlamaArguments, WorkerConfig]:
    """Read a command line. Leaves as argparse does for `--help` and mistakes.

    Raises InvalidArgument for a file that is not served, a missing package, and what is not built.
    """
    refuse_media_output(argv)
    args = _parser().parse_args(argv)
    file = _file(args)
    refuse_roles(args, "llama.cpp")
    header = read_gguf_header(file)
    if header.part != 0:
        raise InvalidArgument(f"{file} is part {header.part + 1} of {header.parts} of a model; give the first part")
    tokenizer = _tokenizer(args.tokenizer, file) if model_input is ModelInput.Tokens else None
    if tokenizer is None and model_input is ModelInput.Tokens:
        raise InvalidArgument(
            f"there is no tokenizer.json beside {file}, and the rule of its own is not known here; give the directory of "
            "one with --tokenizer DIR, or serve text (python -m dynamo.llamacpp does so by itself; --engine llamacpp-text)"
        )
    if args.embedding_worker and tokenizer is None:
        raise InvalidArgument(
            "--embedding-worker: give the directory of the model's tokenizer.json with --tokenizer DIR"
        )
    check_installed()
    trained = header.context_length or UNKNOWN_CONTEXT
    name = args.served_model_name or file.stem  # of the quantisation, too; the file's own name is that of the model
    aliases = (header.name,) if header.name and not args.served_model_name else ()
    arguments = LlamaArguments(
        file=file,
        header=header,
        tokenizer=tokenizer,
        served_name=name,
        aliases=aliases,
        context_length=args.context_length or min(trained, CONTEXT),
        slots=args.slots,
        embeds=args.embedding_worker,
        parameters=_parameters(args),
    )
    worker = worker_config_from(
        args,
        model_name="" if tokenizer is None else str(tokenizer),
        served_model_name=name,
        model_input=model_input,
        enable_kv_routing=False,
        endpoint_types=VECTORS if args.embedding_worker else _surfaces(args, arguments),
    )
    return arguments, worker


def _surfaces(args: argparse.Namespace, arguments: LlamaArguments) -> str:
    """Return what the model is served for; without a template the form of its chats is not known."""
    given: str = args.endpoint_types
    has_template = arguments.header.has_chat_template or "chat_template" in arguments.parameters
    if arguments.tokenizer is not None or has_template or given != DEFAULT_ENDPOINT_TYPES:
        return given
    logger.warning(
        "%s has no chat template: it is served for completions only (--endpoint-types chat,completions serves chats by "
        "llama.cpp's own template, which may not be the model's)",
        arguments.file.name,
    )
    return "completions"


def check_installed() -> None:
    """Raise InvalidArgument with the command that installs what is missing."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise InvalidArgument(
            f"llama.cpp is not installed in this environment: {install_command('llamacpp')} (the package xllamacpp)"
        )


def tokenizer_beside(file: Path) -> Path | None:
    """Return the directory of a GGUF file if the model's tokenizer is in it, too."""
    return file.parent if (file.parent / "tokenizer.json").is_file() else None


def _file(args: argparse.Namespace) -> Path:
    file = Path(args.model).expanduser()
    if not file.is_file():
        raise InvalidArgument(f"there is no file {file}; --model must name a GGUF file")
    return file.absolute()


def _tokenizer(given: str | None, file: Path) -> Path | None:
    if given is None:
        return tokenizer_beside(file) or tokenizer_of(file)
    directory = Path(given).expanduser().absolute()
    if not (directory / "tokenizer.json").is_file():
        raise InvalidArgument(f"--tokenizer {given}: there is no tokenizer.json in this directory")
    return directory


def _parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(
        PROGRAM,
        description="llama.cpp: serves a GGUF file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument_group("llama.cpp").add_argument
    add("--model", "--model-name", required=True, metavar="FILE", help="the GGUF file; of a split model the first part")
    add("--served-model-name", metavar="NAME", help="name clients use (default: the one in the file)")
    add(
        "--tokenizer",
        metavar="DIR",
        help="directory of the model's tokenizer.json (default: the file's, if it is there, else the file's own tokenizer)",
    )
    add(
        "--context-length",
        type=positive,
        metavar="TOKENS",
        help=f"longest prompt and answer (default: the model's, at most {CONTEXT})",
    )
    add("--slots", type=positive, default=SLOTS, metavar="N", help=f"requests at a time (default: {SLOTS})")
    add("--threads", type=positive, metavar="N", help="threads that compute (default: the cores, less one)")
    add("--gpu-layers", type=int, metavar="N", help="layers on a GPU, -1 for all (default: llama.cpp's)")
    add("--embedding-worker", action="store_true", help="make embeddings: /v1/embeddings, and no answers")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any parameter of llama.cpp (xllamacpp.CommonParams), such as cache_type_k or rope_freq_scale; JSON",
    )
    add_backend_arguments(parser)
    return parser


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # llama.cpp's threads wait for each other by spinning: one core is left for everything else.
    threads = args.threads or max(1, cores - 1)
    found: dict[str, Any] = {"cpuparams.n_threads": threads, "cpuparams_batch.n_threads": threads}
    if args.gpu_layers is not None:
        found["n_gpu_layers"] = args.gpu_layers
    for entry in args.set:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"--set {entry}: write NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value  # text needs no quotes
    return found

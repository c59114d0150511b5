"""The command line: the flags that every worker has, and all of SGLang's, passed on as they are."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import InvalidArgument
from dynamo.worker.hub import served_name

__all__ = ["MARK", "SglangArguments", "read_arguments"]

PROGRAM: Final = "dynamo.sglang"
MARK: Final = "behaviour tested (0.5.23, on a CPU), speed not"
_EPILOG: Final = (
    "Every other flag is SGLang's own and is passed on as it is; they follow below where SGLang is installed."
)
_REFUSED: Final = {
    "--embedding-worker": "embedding workers are not built",
    "--enable-multimodal": "images, audio and video are not built",
    "--skip-tokenizer-init": "SGLang then ignores constraints and min_tokens",
    "--is-embedding": "embedding workers are not built",
}


@dataclass(frozen=True, slots=True)
class SglangArguments:
    """A command line, read."""

    model: str
    served_name: str
    sglang: Sequence[str]  # SGLang's own flags, of which its arguments are made once it is imported


def read_arguments(argv: Sequence[str] | None = None) -> tuple[SglangArguments, WorkerConfig]:
    """Read a command line. Leaves as argparse does for `--help` and mistakes.

    Raises InvalidArgument for a missing package and for what is not built.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _own_parser()
    if not {"-h", "--help"}.isdisjoint(given):
        sys.stdout.write(parser.format_help())
        check_installed()
        sys.stdout.write("\n" + sglang_parser().format_help())
        raise SystemExit(0)
    own, rest = parser.parse_known_args(given)
    for word in rest:
        flag = word.partition("=")[0]
        if flag in _REFUSED:
            raise InvalidArgument(f"{flag}: {_REFUSED[flag]}")
    if own.disaggregation_mode is not DisaggregationMode.AGGREGATED:
        raise InvalidArgument(
            f"--disaggregation-mode {own.disaggregation_mode}: prefill and decode on different workers are not built for SGLang"
        )
    if not own.model:
        parser.error("--model-path is missing: the directory or name of a model")
    check_installed()
    name = own.served_model_name or served_name(own.model)
    worker = worker_config_from(own, model_name=own.model, served_model_name=name, enable_kv_routing=False)
    return SglangArguments(own.model, name, tuple(rest)), worker


def check_installed() -> None:
    """Raise InvalidArgument with the command that installs what is missing."""
    if importlib.util.find_spec("sglang") is None:
        raise InvalidArgument(
            "SGLang is not installed in this environment: pip install 'sglang==0.5.23' (docs/engines.md)"
        )


def sglang_parser() -> argparse.ArgumentParser:
    """Return the parser of SGLang's flags; imports SGLang, which takes seconds."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(f"{PROGRAM} (flags of SGLang)", usage="%(prog)s [options]", add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser


def server_arguments(arguments: SglangArguments) -> Any:
    """Return SGLang's `ServerArgs`. Leaves as argparse does for a flag that SGLang does not have."""
    from sglang.srt.server_args import ServerArgs

    own = ["--model-path", arguments.model, "--incremental-streaming-output", "--skip-server-warmup"]
    return ServerArgs.from_cli_args(sglang_parser().parse_args([*own, *arguments.sglang]))


def _own_parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(PROGRAM, add_help=False, description=f"SGLang: {MARK}.", epilog=_EPILOG)
    group = parser.add_argument_group("SGLang engine")
    group.add_argument("--model-path", "--model", "--model-name", dest="model", help="directory or name of the model")
    group.add_argument("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    add_backend_arguments(parser)
    return parser

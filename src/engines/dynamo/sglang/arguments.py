"""The command line: the flags that every worker has, and all of SGLang's, passed on as they are."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.contract.kv_events import ZmqSource
from dynamo.engines.adapter import refuse_roles
from dynamo.engines.native_flags import SGLANG, add_version, without_native_flags
from dynamo.errors import InvalidArgument
from dynamo.worker.hub import served_name

logger = logging.getLogger(__name__)

PROGRAM: Final = SGLANG
IS_EMBEDDING: Final = "--is-embedding"  # SGLang's flag
VECTORS: Final = "embedding"
SMALLEST_PAGE: Final = 8  # tokens
DEFAULT_ENDPOINT: Final = "tcp://*:5557"  # of SGLang
MARK: Final = "behaviour tested (0.5.23, on a CPU), speed not"
_EPILOG: Final = (
    "Every other flag is SGLang's own and is passed on as it is; they follow below where SGLang is installed."
)


@dataclass(frozen=True, slots=True)
class SglangArguments:
    """A command line, read."""

    model: str
    served_name: str
    sglang: Sequence[str]  # SGLang's own flags, of which its arguments are made once it is imported
    is_kv_routed: bool = False  # whether a router takes KV events
    embeds: bool = False  # makes vectors, and generates nothing


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
    own, rest = parser.parse_known_args(without_native_flags(PROGRAM, given))
    refuse_roles(own, "SGLang")
    if not own.model:
        parser.error("--model-path is missing: the directory or name of a model")
    check_installed()
    name = own.served_model_name or served_name(own.model)
    embeds = own.embedding_worker or IS_EMBEDDING in rest
    rest = [word for word in rest if word != IS_EMBEDDING]
    if not embeds:
        worker = worker_config_from(own, model_name=own.model, served_model_name=name)
        return SglangArguments(own.model, name, tuple(rest), worker.enable_kv_routing), worker
    worker = worker_config_from(
        own, model_name=own.model, served_model_name=name, enable_kv_routing=False, endpoint_types=VECTORS
    )
    return SglangArguments(own.model, name, (*rest, IS_EMBEDDING), embeds=True), worker


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


def server_arguments(arguments: SglangArguments, directory: Path) -> Any:
    """Return SGLang's `ServerArgs`. Leaves as argparse does for a flag that SGLang does not have.

    KV events go through a socket in `directory`, unless the operator chose otherwise.
    """
    from sglang.srt.server_args import ServerArgs

    own = ["--model-path", arguments.model, "--incremental-streaming-output", "--skip-server-warmup"]
    parsed = sglang_parser().parse_args([*own, *arguments.sglang])
    if arguments.is_kv_routed and parsed.kv_events_config is None:
        why_not = _without_events(parsed)
        if why_not is None:
            events = {"publisher": "zmq", "endpoint": f"ipc://{directory}/kv-events", "topic": ""}
            parsed.kv_events_config = json.dumps(events)
        else:
            logger.info("no KV events, so routers spread by load: %s", why_not)
    return ServerArgs.from_cli_args(parsed)


def _without_events(parsed: argparse.Namespace) -> str | None:
    """Return why SGLang shall publish no KV events; None: it shall."""
    if parsed.disable_radix_cache:
        return "--disable-radix-cache"
    if parsed.dp_size > 1:
        return "--dp-size: sources of several ranks are not built"
    if (parsed.page_size or 1) < SMALLEST_PAGE:
        return f"--page-size {parsed.page_size or 1} is below {SMALLEST_PAGE}, and an event is made for each page"
    return None


def events_source(config: str | None) -> ZmqSource | None:
    """Return where SGLang publishes KV events, by its `kv_events_config`; None: nowhere, or not by ZMQ."""
    found = json.loads(config) if config else {}
    if found.get("publisher") != "zmq":
        return None
    return ZmqSource(found.get("endpoint", DEFAULT_ENDPOINT), topic=found.get("topic", ""))


def _own_parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(PROGRAM, add_help=False, description=f"SGLang: {MARK}.", epilog=_EPILOG)
    add_version(parser)
    group = parser.add_argument_group("SGLang engine")
    group.add_argument("--model-path", "--model", "--model-name", dest="model", help="directory or name of the model")
    group.add_argument("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    group.add_argument(
        "--embedding-worker",
        action="store_true",
        help="make embeddings: SGLang's `--is-embedding`, and `/v1/embeddings`",
    )
    add_backend_arguments(parser)
    return parser

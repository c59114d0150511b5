"""The command line: the server, the key for it, the models of it that are served, and its limits of time."""

from __future__ import annotations

import importlib.util
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import WorkerConfig
from dynamo.engines.native_flags import refuse_media_output
from dynamo.errors import InvalidArgument
from dynamo.protocol.model_types import ModelInput
from dynamo.settings.extras import install_command

MAX_KEY_BYTES: Final = 16 * 1024
_EPILOG: Final = """\
Chats and completions of each --model go to the server in OpenAI's form, and its answer goes back as it comes. The server is
checked with GET /models; while it cannot be reached, the models of this worker are not ready. HTTPS_PROXY, HTTP_PROXY and
NO_PROXY count, and certificates of the system's authorities, to which --upstream-ca-file adds further ones.
"""


@dataclass(frozen=True, slots=True)
class UpstreamArguments:
    """A command line, read."""

    url: str  # without a slash at its end
    models: Mapping[str, str]  # the name here -> the name there; in the order of the command line, never empty
    key_file: Path | None = None
    tls: ssl.SSLContext | None = field(default=None, repr=False)  # None: no TLS
    retries: int = 2  # further attempts, before the first byte of an answer
    retry_seconds: float = 10.0  # the longest `Retry-After` that is obeyed
    connect_seconds: float = 5.0
    silence_seconds: float = 300.0  # before the first byte, and between two
    check_seconds: float = 10.0

    def key(self) -> str:
        """Return the key; "": none is needed. Raises InvalidArgument for a file that cannot be a key."""
        if self.key_file is None:
            return ""
        try:
            with self.key_file.open(encoding="ascii") as file:
                found = file.read(MAX_KEY_BYTES + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not ASCII text"
            raise InvalidArgument(f"--upstream-key-file {self.key_file}: {reason}") from None
        if not found or len(found) > MAX_KEY_BYTES or not found.isprintable() or " " in found:
            raise InvalidArgument(f"--upstream-key-file {self.key_file}: the file must hold one key and nothing else")
        return found


def read_arguments(argv: Sequence[str] | None = None) -> tuple[UpstreamArguments, WorkerConfig]:
    """Read a command line. Leaves as argparse does for `--help` and mistakes.

    Raises InvalidArgument for what cannot be served, and where aiohttp is missing.
    """
    refuse_media_output(argv)
    args = _parser().parse_args(argv)
    if importlib.util.find_spec("aiohttp") is None:
        raise InvalidArgument(f"to call another server a package is needed: {install_command('upstream')}")
    url = _url(args.upstream)
    models = dict(_model(given) for given in args.model)
    arguments = UpstreamArguments(
        url=url,
        models=models,
        key_file=None if args.upstream_key_file is None else Path(args.upstream_key_file).expanduser(),
        tls=_tls(args.upstream_ca_file) if url.startswith("https:") else None,
        retries=args.upstream_retries,
        retry_seconds=args.upstream_retry_wait,
        connect_seconds=args.upstream_connect_timeout,
        silence_seconds=args.upstream_timeout,
        check_seconds=args.upstream_check,
    )
    arguments.key()
    first = next(iter(models))
    return arguments, worker_config_from(
        args,
        model_name=first,
        served_model_name=first,
        model_input=ModelInput.Text,
        enable_kv_routing=False,
        endpoint_types=args.endpoint_types,
    )


def _url(given: str) -> str:
    try:
        parts = urlsplit(given)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or parts.username or parts.password:
        raise InvalidArgument("--upstream must be an address such as https://host/v1, without a key or a query in it")
    return given.rstrip("/")


def _model(given: str) -> tuple[str, str]:
    name, _, theirs = given.partition("=")
    if not name or ("=" in given and not theirs):
        raise InvalidArgument(f"--model {given!r}: write NAME, or NAME=THEIR-NAME")
    return name, theirs or name


def _tls(ca_file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=Path(ca_file).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(f"--upstream-ca-file {ca_file}: {error.strerror or error}") from None
    return context


def _parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(
        "dynamo.upstream", description="Serves models of another OpenAI-compatible server.", epilog=_EPILOG
    )
    add = parser.add_argument_group("upstream").add_argument
    add("--upstream", required=True, metavar="URL", help="where its API begins, such as https://host/v1")
    add("--upstream-key-file", metavar="FILE", help="a file with the key for it; read again at each check")
    add("--upstream-ca-file", metavar="FILE", help="further certificate authorities to trust, PEM")
    add(
        "--model",
        action="append",
        required=True,
        metavar="NAME[=THEIRS]",
        help="a model, by the name that clients use here and the name it has there; may be repeated",
    )
    add("--upstream-timeout", type=_seconds, default=300.0, metavar="SECONDS", help="longest silence (default: 300)")
    add("--upstream-connect-timeout", type=_seconds, default=5.0, metavar="SECONDS", help="(default: 5)")
    add("--upstream-retries", type=_count, default=2, metavar="N", help="attempts after the first one (default: 2)")
    add(
        "--upstream-retry-wait",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="the longest Retry-After that is waited for (default: 10)",
    )
    add("--upstream-check", type=_seconds, default=10.0, metavar="SECONDS", help="between checks (default: 10)")
    add_backend_arguments(parser)
    return parser


def _seconds(given: str) -> float:
    value = float(given)
    if not 0 < value <= 86_400:
        raise ValueError(given)
    return value


def _count(given: str) -> int:
    value = int(given)
    if not 0 <= value <= 10:
        raise ValueError(given)
    return value

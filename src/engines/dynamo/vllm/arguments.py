"""The command line: the flags that every worker has, a few of this engine, and all of vLLM's, passed on as they are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo.contract.args import BackendArgumentParser, add_backend_arguments, worker_config_from
from dynamo.contract.config import DEFAULT_COMPONENT, DEFAULT_ENDPOINT_TYPES, WorkerConfig
from dynamo.contract.endpoint_name import ENDPOINT_SCHEME
from dynamo.contract.modes import DisaggregationMode
from dynamo.engines.native_flags import VLLM, add_version, without_native_flags
from dynamo.errors import InvalidArgument
from dynamo.protocol.model_types import ModelType, parse_endpoint_types
from dynamo.vllm.errors import configuration_error
from dynamo.vllm.installed import import_vllm
from dynamo.vllm.model_files import check_model, check_weights, is_local
from dynamo.vllm.pooling import POOLING
from dynamo.vllm.roles import ROLES, VllmRole, make_role

PROGRAM: Final = VLLM
VECTORS: Final = "embedding"  # what a pooling worker serves by default
_EPILOG: Final = "Every other flag is vLLM's own and is passed on as it is; they follow below where vLLM is installed."


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line, read."""

    model: str  # as given: vLLM replaces a name by a path
    served_name: str | None
    aliases: tuple[str, ...]
    has_kv_events_config: bool  # the operator set whether and where KV events are published
    is_kv_routed: bool  # whether a router takes the KV events
    vllm: Any  # vLLM's `AsyncEngineArgs`
    role: VllmRole
    worker: WorkerConfig

    @property
    def embeds(self) -> bool:
        """Whether the worker was started to make vectors."""
        return bool(self.vllm.runner == POOLING)


def read_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Read a command line. Leaves as argparse does for `--help` and mistakes; raises InvalidArgument for what is not built."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _own_parser()
    if not {"-h", "--help"}.isdisjoint(given):
        sys.stdout.write(parser.format_help())
        sys.stdout.write("\n" + _vllm_parser().format_help())
        raise SystemExit(0)
    own, rest = parser.parse_known_args(without_native_flags(PROGRAM, given))
    check_built(own, rest)
    names = served_names(own.served_model_name)
    if not own.model:
        parser.error("--model is missing: the directory or name of a model")
    check_model(own.model)
    vllm = _vllm_arguments(own.model, names, rest)
    if own.embedding_worker:
        vllm.runner = POOLING
    worker = _worker_config(own, names, is_pooling=vllm.runner == POOLING)
    if vllm.kv_transfer_config is not None and not any("kv_load_failure_policy" in word for word in rest):
        # vLLM's default ends a request whose blocks could not be fetched; here its prompt is computed.
        vllm.kv_transfer_config.kv_load_failure_policy = "recompute"
    return Arguments(
        model=own.model,
        served_name=names[0] if names else None,
        aliases=tuple(names[1:]),
        has_kv_events_config=any(word.partition("=")[0] == "--kv-events-config" for word in rest),
        is_kv_routed=worker.enable_kv_routing and vllm.runner != POOLING,
        vllm=vllm,
        role=make_role(worker.disaggregation_mode, vllm.kv_transfer_config, has_adapters=bool(vllm.enable_lora)),
        worker=worker,
    )


def check_built(own: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raise InvalidArgument that names a flag for which nothing is built."""
    without_native_flags(PROGRAM, rest)
    if own.connector:
        example = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        raise InvalidArgument(f"--connector is not an option of this engine; write --kv-transfer-config '{example}'")
    if own.disaggregation_mode not in ROLES:
        raise InvalidArgument(f"--disaggregation-mode {own.disaggregation_mode}: encode workers are not built for vLLM")


def _worker_config(own: argparse.Namespace, names: Sequence[str], *, is_pooling: bool) -> WorkerConfig:
    """Return the worker's configuration; a prefill worker is its own component, unless another one is named.

    A pooling worker serves embeddings. Raises InvalidArgument where it is to be one half of a request.
    """
    name = names[0] if names else None
    if is_pooling:
        if own.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            raise InvalidArgument("--disaggregation-mode: a pooling worker generates nothing that could be divided")
        types = VECTORS if own.endpoint_types == DEFAULT_ENDPOINT_TYPES else own.endpoint_types
        if parse_endpoint_types(types) & (ModelType.Chat | ModelType.Completions):
            raise InvalidArgument(f"--endpoint-types {types}: a pooling worker generates nothing")
        return worker_config_from(own, model_name=own.model, served_model_name=name, endpoint_types=types)
    is_default = own.component == DEFAULT_COMPONENT and not own.endpoint.startswith(ENDPOINT_SCHEME)
    if is_default and own.disaggregation_mode is DisaggregationMode.PREFILL:
        component = own.disaggregation_mode.discovery_component
        return worker_config_from(own, model_name=own.model, served_model_name=name, component=component)
    return worker_config_from(own, model_name=own.model, served_model_name=name)


def served_names(values: Sequence[str] | None) -> list[str]:
    """Return the served names, the first of which is the name and the others are aliases: `A B,C` is three."""
    names = [name.strip() for value in values or () for name in value.split(",")]
    return list(dict.fromkeys(name for name in names if name))


def _own_parser() -> BackendArgumentParser:
    parser = BackendArgumentParser(PROGRAM, add_help=False, epilog=_EPILOG)
    add_version(parser)
    group = parser.add_argument_group("vLLM engine")
    group.add_argument("--model", "--model-name", metavar="MODEL", help="directory or name of the model")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that clients use: the first is the model's, the others are aliases",
    )
    group.add_argument(
        "--embedding-worker",
        action="store_true",
        help="make embeddings: vLLM's `--runner pooling`, and `/v1/embeddings`",
    )
    add_backend_arguments(parser)
    return parser


def _vllm_parser() -> argparse.ArgumentParser:
    import_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(
        FlexibleArgumentParser(f"{PROGRAM} (flags of vLLM)", usage="%(prog)s [options]", add_help=False)
    )
    return parser


def _vllm_arguments(model: str, names: Sequence[str], rest: Sequence[str]) -> Any:
    parser = _vllm_parser()
    from vllm.engine.arg_utils import AsyncEngineArgs

    name = ["--served-model-name", *names] if names else []
    parsed = parser.parse_args(["--model", model, *name, *rest])
    check_weights(model, str(parsed.load_format))
    try:
        return AsyncEngineArgs.from_cli_args(parsed)
    except Exception as error:
        refusal = configuration_error(error, is_local=is_local(model))
        if refusal is None:
            raise
        raise refusal from error

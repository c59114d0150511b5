"""The engine's own flags, beside those of every backend."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dynamo.common.multimodal import check_transfer_mode
from dynamo.contract.args import BackendArgumentParser, add_backend_arguments
from dynamo.contract.modes import DisaggregationMode, EmbeddingTransferMode
from dynamo.contract.requests.pooling import MODES
from dynamo.engines.native_flags import refuse_media_output
from dynamo.errors import InvalidArgument
from dynamo.protocol.guided_limits import GuidedLimits
from dynamo.reference import demo
from dynamo.reference.guided import COMPILE_LIMIT
from dynamo.reference.kv_transfer import TRANSPORTS, TransferOptions, check_installed
from dynamo.reference.loading import Options
from dynamo.reference.media import DEFAULT_PART_TOKENS, MediaOptions
from dynamo.reference.roles import RoleOptions
from dynamo.runtime.base.settings import RequestPlaneSettings
from dynamo.settings.table import read_settings


def read_arguments(
    argv: list[str] | None, *, may_encode: bool = False
) -> tuple[argparse.Namespace, Options, RoleOptions]:
    """Return the command line, and the engine and role that it defines. Ends the process for a mistake (status 2).

    `may_encode`: the role of an encode worker is allowed, which has an engine of its own.
    """
    parser = BackendArgumentParser("dynamo.reference", description="An inference engine in NumPy.")
    _add_flags(parser)
    add_backend_arguments(parser)
    args = parser.parse_args(argv)
    if args.model is None:
        demo.choose(args)
    try:
        refuse_media_output(argv)
        options = Options(
            block_size=args.block_size,
            kv_cache_mb=args.kv_cache_mb,
            context_length=args.context_length,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            prefix_caching=not args.no_prefix_caching,
            max_loras=args.max_loras,
            pooling=args.pooling,
            normalize=args.normalize,
            guided=read_settings(GuidedLimits, os.environ),
            guided_compile_seconds=COMPILE_LIMIT.value(os.environ),
        )
        transfer = TransferOptions(
            args.kv_transfer,
            args.kv_transfer_host or RequestPlaneSettings.from_env().rpc_host,
            args.kv_transfer_port,
            args.kv_hold_seconds,
            args.kv_pull_seconds,
        )
        if args.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            check_installed(transfer)
        is_encoder = args.disaggregation_mode is DisaggregationMode.ENCODE
        if is_encoder and not may_encode:
            raise InvalidArgument("--disaggregation-mode encode needs the command python -m dynamo.reference")
        if args.embedding_transfer_mode is not None:
            if not is_encoder:
                raise InvalidArgument(
                    "--embedding-transfer-mode is a flag of encode workers: the other side reads the mode in what it gets"
                )
            check_transfer_mode(args.embedding_transfer_mode)
        part_tokens = args.media_tokens or (DEFAULT_PART_TOKENS if is_encoder else 0)
        media = MediaOptions(part_tokens, args.disaggregation_mode, args.route_to_encoder)
        role = RoleOptions(args.disaggregation_mode, transfer, args.require_prefill_result, media)
    except InvalidArgument as error:
        parser.error(str(error))
    return args, options, role


def _transfer_mode(text: str) -> EmbeddingTransferMode:
    """Read a mode. Raises ArgumentTypeError listing all of them."""
    try:
        return EmbeddingTransferMode(text)
    except ValueError:
        modes = ", ".join(mode.value for mode in EmbeddingTransferMode)
        raise argparse.ArgumentTypeError(f"must be one of {modes}, got {text!r}") from None


def _add_flags(parser: argparse.ArgumentParser) -> None:
    default = Options()
    add = parser.add_argument_group("reference engine").add_argument
    add(
        "--model",
        "--model-name",
        type=lambda text: Path(text).expanduser(),
        metavar="DIR",
        help="directory of a Llama, Qwen2 or Qwen3 model (default: the demonstration model that comes with us)",
    )
    add("--served-model-name", metavar="NAME", help="name clients use (default: the directory's)")
    add("--context-length", type=int, metavar="TOKENS", help="longest prompt and answer (default: the model's)")
    add(
        "--block-size", type=int, default=default.block_size, metavar="TOKENS", help="tokens per KV block (default: 16)"
    )
    add(
        "--kv-cache-mb",
        type=int,
        default=default.kv_cache_mb,
        metavar="MB",
        help="memory of the KV cache (default: 256)",
    )
    add(
        "--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N", help="requests in one step (default: 64)"
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        metavar="TOKENS",
        help="tokens in one step; longer prompts are computed in pieces (default: 512)",
    )
    add(
        "--kv-transfer",
        choices=TRANSPORTS,
        default="tcp",
        help="how KV blocks get from prefill to decode workers; nixl needs its extra (default: tcp)",
    )
    add(
        "--kv-transfer-host",
        metavar="HOST",
        help="address decode workers fetch from (default: DYN_TCP_RPC_HOST, or this machine's)",
    )
    add("--kv-transfer-port", type=int, default=0, metavar="PORT", help="0 is any free one (default: 0)")
    add(
        "--kv-hold-seconds",
        type=float,
        default=TransferOptions().hold_seconds,
        metavar="SECONDS",
        help="how long a prefill worker holds blocks that nobody fetches (default: 30)",
    )
    add(
        "--kv-pull-seconds",
        type=float,
        default=TransferOptions().pull_seconds,
        metavar="SECONDS",
        help="how long fetching the blocks of one prompt may take (default: 30)",
    )
    add(
        "--require-prefill-result",
        action="store_true",
        help="a decode worker refuses requests without one, instead of computing their prompts",
    )
    add(
        "--max-loras",
        type=int,
        default=default.max_loras,
        metavar="N",
        help="LoRA adapters loaded at once (default: 8)",
    )
    add(
        "--media-tokens",
        type=int,
        default=0,
        metavar="N",
        help="let each sound or video of a request, and each image where the model does not see, stand as N tokens that are "
        "drawn from its content: this shows the way of media through encode workers (default: 0, they are refused; encode "
        "workers: 16)",
    )
    add(
        "--embedding-transfer-mode",
        type=_transfer_mode,
        metavar="MODE",
        help="how an encode worker hands over what it made: local (a temporary file) or shared-memory, to workers on the same "
        "machine (default: in its answer, which reaches any machine)",
    )
    add(
        "--pooling",
        choices=MODES,
        help="how the vector of an input is made of its tokens (default: as the model's modules.json says, or mean)",
    )
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="give vectors the length 1 (default: as the model's modules.json says, or yes)",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt from its start; publish no KV events")

"""How KV blocks get from a prefill worker to a decode worker. `base` defines what every transport promises."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from dynamo.errors import InvalidArgument
from dynamo.reference.kv_transfer.base import (
    NIXL_PACKAGES,
    BlockSource,
    KvReceiver,
    KvSender,
    Layout,
    Ticket,
    TransferOptions,
    nixl_missing,
)
from dynamo.reference.kv_transfer.tcp import TcpReceiver, TcpSender

__all__ = [
    "TRANSPORTS",
    "BlockSource",
    "KvReceiver",
    "KvSender",
    "Layout",
    "Ticket",
    "TransferOptions",
    "check_installed",
    "make_receiver",
    "make_sender",
]

TRANSPORTS: Final = ("tcp", "nixl")


def make_sender(source: BlockSource, options: TransferOptions) -> KvSender:
    """Make a prefill worker's side, not started. Raises InvalidArgument for a transport that is unknown or not installed."""
    check_installed(options)
    if options.transport == "nixl":
        from dynamo.reference.kv_transfer.nixl import NixlSender

        return NixlSender(source, options)
    return TcpSender(source, options)


def make_receiver(layout: Layout, options: TransferOptions) -> KvReceiver:
    """Make a decode worker's side. Raises InvalidArgument as `make_sender` does."""
    check_installed(options)
    if options.transport == "nixl":
        from dynamo.reference.kv_transfer.nixl import NixlReceiver

        return NixlReceiver(layout, options)
    return TcpReceiver(layout, options)


def check_installed(options: TransferOptions) -> None:
    """Raises InvalidArgument for a transport that is unknown, or not installed; loads nothing."""
    if options.transport not in TRANSPORTS:
        raise InvalidArgument(f"--kv-transfer must be one of {', '.join(TRANSPORTS)}, got {options.transport!r}")
    if options.transport == "nixl" and not any(map(find_spec, NIXL_PACKAGES)):
        raise InvalidArgument(nixl_missing())

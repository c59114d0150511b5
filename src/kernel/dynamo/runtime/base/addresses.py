"""Under which address this machine is reached, and at which addresses its listeners listen."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from contextlib import suppress
from typing import Final

from dynamo.errors import CannotConnect

WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})  # to bind, but not to advertise
LOOPBACK: Final = "127.0.0.1"
LOCAL_STORES: Final = frozenset({"mem", "file"})  # discovery that normally serves the processes of one machine


def detect_host() -> str:
    """Return the address at which other machines most likely reach this one; 127.0.0.1 where there is no network."""
    # A datagram socket that is connected sends nothing, but learns which local address its route would use. The
    # targets are the documentation networks, which no packet may ever be sent to.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                host = str(probe.getsockname()[0])
        except OSError:
            continue  # no such family, or no route
        if not host.startswith("127.") and host not in ("::1", "0.0.0.0", "::"):
            return host
    return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a listener bound to this address is reached from its own machine only. Other names than localhost: no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def http_url(host: str, port: int) -> str:
    """Write the address of an HTTP listener."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket that does not listen yet. Raises OSError when the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by accepted connections: without it the second small write of a stream waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


LONGEST_PATH: Final = 103 if sys.platform == "darwin" else 107  # bytes of a Unix socket's, on this system


class UnixListener(socket.socket):
    """A Unix socket at a path that only this user may use, bound and not listening yet. `close` takes the path away."""

    def __init__(self, path: str) -> None:
        """What a process that is gone left at the path is replaced. Raises `CannotConnect` for anything else there."""
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path, self._inode = path, -1
        try:
            _make_room(path)
            self.bind(path)
            os.chmod(path, 0o600)  # nothing can connect to it before it listens
            self._inode = os.lstat(path).st_ino
        except (OSError, CannotConnect) as error:
            self.close()
            reason = error if isinstance(error, CannotConnect) else error.strerror or error
            if (size := len(os.fsencode(path))) > LONGEST_PATH:
                reason = f"too long for a Unix socket: the path has {size} bytes, and may have {LONGEST_PATH}"
            raise CannotConnect(f"--uds {path}: {reason}") from None

    def close(self) -> None:
        """Close it, and remove its file unless another process has replaced it. Idempotent."""
        super().close()
        with suppress(OSError):  # it is gone already, or its folder is
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)


def _make_room(path: str) -> None:
    """Remove the socket of a process that is gone. Raises `CannotConnect` for anything else at the path."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise CannotConnect("there is a file that is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
            except BlockingIOError:
                pass  # as many wait as it takes
        raise CannotConnect("another process listens there")


def bind_host(store: str, asked: str | None, in_cluster: str) -> str:
    """Choose the address a listener binds: the configured one, else loopback where discovery is of one machine.

    `store`: the discovery backend in use ("mem", "file", "etcd", "kubernetes"). `in_cluster`: where the native system binds.
    """
    if asked is not None:
        return asked
    return LOOPBACK if store in LOCAL_STORES else in_cluster

"""`mux`, our own request plane: one connection per pair of processes, all streams on it. See `docs/wire.md`."""

from dynamo.runtime.calls.request_plane.mux.client import MuxClient
from dynamo.runtime.calls.request_plane.mux.frames import MAGIC, VERSION
from dynamo.runtime.calls.request_plane.mux.server import MuxServerProtocol

__all__ = ["MAGIC", "VERSION", "MuxClient", "MuxServerProtocol"]

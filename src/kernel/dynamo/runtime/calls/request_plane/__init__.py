"""The request plane: a request goes to one instance, a stream of items comes back. `base.py` holds the promises.

`listener.py` is the worker's TCP port (`mux` and the native wire), `mux/` our wire, `native/` the 1.6 one, `memory.py` the
plane inside one process.
"""

from pkgutil import extend_path

from dynamo.runtime.calls.request_plane.base import (
    Handler,
    Instance,
    RequestPlaneClient,
    RequestPlaneServer,
    ResponseSink,
    ResponseStream,
    StreamItem,
)
from dynamo.runtime.calls.request_plane.memory import MemoryPlane

__path__ = extend_path(__path__, __name__)  # the native wire is in `src/compat`

__all__ = [
    "Handler",
    "Instance",
    "MemoryPlane",
    "RequestPlaneClient",
    "RequestPlaneServer",
    "ResponseSink",
    "ResponseStream",
    "StreamItem",
]

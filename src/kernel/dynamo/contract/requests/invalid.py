"""The error of these helpers: a request that cannot be served as it is."""

from __future__ import annotations

from dynamo.errors import InvalidArgument


class InvalidRequest(InvalidArgument, ValueError, TypeError):
    """Reaches the client as a 400. It is also the Python error that the native system's helpers raise, so that code
    written for those catches it."""

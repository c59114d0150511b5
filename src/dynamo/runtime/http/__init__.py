"""A small HTTP/1.1 server for ASGI applications, with limits on everything that a client may cost."""

from dynamo.runtime.http.limits import HttpLimits, Rejection
from dynamo.runtime.http.service import HttpService

__all__ = ["HttpLimits", "HttpService", "Rejection"]

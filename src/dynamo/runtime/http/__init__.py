"""A small HTTP/1.1 server for ASGI applications, with limits on everything that a client may cost."""

from dynamo.runtime.http.service import HttpService
from dynamo.runtime.http_limits import HttpLimits, Rejection

__all__ = ["HttpLimits", "HttpService", "Rejection"]

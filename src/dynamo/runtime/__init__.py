"""How processes find and talk to each other. Knows nothing of LLMs."""

from dynamo.runtime.client import Client
from dynamo.runtime.context import Context
from dynamo.runtime.decorators import (
    PyAsyncRequestStream,
    UnaryClient,
    dynamo_endpoint,
    dynamo_worker,
    serve_unary_endpoint,
)
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.endpoint import Endpoint

__all__ = [
    "Client",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "PyAsyncRequestStream",
    "UnaryClient",
    "dynamo_endpoint",
    "dynamo_worker",
    "serve_unary_endpoint",
]

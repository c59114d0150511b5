"""How processes find and talk to each other. Knows nothing of LLMs."""

from __future__ import annotations

import importlib
from pkgutil import extend_path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dynamo.runtime.calls.context import Context
    from dynamo.runtime.client import Client
    from dynamo.runtime.decorators import (
        PyAsyncRequestStream,
        UnaryClient,
        dynamo_endpoint,
        dynamo_worker,
        serve_unary_endpoint,
    )
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.runtime.endpoint import Endpoint

__path__ = extend_path(__path__, __name__)  # the native wire is in `src/compat`

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

_HOMES: Final = {
    "Client": "client",
    "Context": "calls.context",
    "DistributedRuntime": "distributed",
    "Endpoint": "endpoint",
    "PyAsyncRequestStream": "decorators",
    "UnaryClient": "decorators",
    "dynamo_endpoint": "decorators",
    "dynamo_worker": "decorators",
    "serve_unary_endpoint": "decorators",
}
"""The module of each public name. Loaded at first use: a user of one module of this package does not pay for all."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

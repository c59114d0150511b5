"""Facade: the health check payloads of `dynamo.contract.health_check` under the native path."""

from dynamo.contract.health_check import *  # noqa: F403
from dynamo.contract.health_check import __all__ as __all__

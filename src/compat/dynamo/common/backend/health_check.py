"""Facade: `dynamo.contract.health_check` under the path of the guide."""

from dynamo.contract.health_check import *  # noqa: F403
from dynamo.contract.health_check import __all__ as __all__

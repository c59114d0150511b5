"""Facade: `dynamo.contract.telemetry` under the path of the guide."""

from dynamo.contract.telemetry import *  # noqa: F403
from dynamo.contract.telemetry import __all__ as __all__

"""Facade: `dynamo.contract.engine_gauges` under the path of the guide."""

from dynamo.contract.engine_gauges import *  # noqa: F403
from dynamo.contract.engine_gauges import __all__ as __all__

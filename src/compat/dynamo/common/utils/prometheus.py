"""Facade: `dynamo.contract.engine_gauges` under the path of the guide."""

from functools import partial

from dynamo.common.absent import load_name
from dynamo.contract.engine_gauges import *  # noqa: F403
from dynamo.contract.engine_gauges import __all__ as __all__

__getattr__ = partial(load_name, __name__)

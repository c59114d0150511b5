"""Facade: `dynamo.engines.sample.engine` under the path of the guide."""

from dynamo.engines.sample.engine import *  # noqa: F403
from dynamo.engines.sample.engine import __all__ as __all__

"""Facade: `dynamo.contract.metrics` under the path of the guide."""

from dynamo.contract.metrics import *  # noqa: F403
from dynamo.contract.metrics import __all__ as __all__

"""Facade: `dynamo.contract.engine` under the path of the guide."""

from dynamo.contract.engine import *  # noqa: F403
from dynamo.contract.engine import __all__ as __all__

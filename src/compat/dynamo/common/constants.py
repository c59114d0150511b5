"""Facade: `dynamo.contract.modes` under the path of the guide."""

from dynamo.contract.modes import *  # noqa: F403
from dynamo.contract.modes import __all__ as __all__

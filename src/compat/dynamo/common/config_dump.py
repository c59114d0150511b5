"""Facade: `dynamo.contract.config_dump` under the path of the guide."""

from dynamo.contract.config_dump import *  # noqa: F403
from dynamo.contract.config_dump import __all__ as __all__

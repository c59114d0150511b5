"""Facade: `dynamo.contract.token_budget` under the path of the guide."""

from dynamo.contract.token_budget import *  # noqa: F403
from dynamo.contract.token_budget import __all__ as __all__

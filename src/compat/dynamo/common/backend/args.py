"""Facade: `dynamo.contract.args` under the path of the guide."""

from dynamo.contract.args import *  # noqa: F403
from dynamo.contract.args import __all__ as __all__

"""Facade: `dynamo.contract.conformance` under the path of the guide."""

from dynamo.contract.conformance import *  # noqa: F403
from dynamo.contract.conformance import __all__ as __all__

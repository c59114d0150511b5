"""Facade: `dynamo.contract.requests.input_params` under the path of the guide."""

from dynamo.contract.requests.input_params import *  # noqa: F403
from dynamo.contract.requests.input_params import __all__ as __all__

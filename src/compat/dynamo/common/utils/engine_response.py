"""Facade: `dynamo.contract.requests.engine_response` under the path of the guide."""

from dynamo.contract.requests.engine_response import *  # noqa: F403
from dynamo.contract.requests.engine_response import __all__ as __all__

"""Facade: `dynamo.contract.requests.disaggregation` under the path of the guide."""

from dynamo.contract.requests.disaggregation import *  # noqa: F403
from dynamo.contract.requests.disaggregation import __all__ as __all__

"""Facade: `dynamo.contract.requests.dp_rank` under the path of the guide."""

from dynamo.contract.requests.dp_rank import *  # noqa: F403
from dynamo.contract.requests.dp_rank import __all__ as __all__

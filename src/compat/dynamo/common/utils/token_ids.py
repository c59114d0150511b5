"""Facade: `dynamo.contract.requests.token_ids` under the path of the guide."""

from dynamo.contract.requests.token_ids import *  # noqa: F403
from dynamo.contract.requests.token_ids import __all__ as __all__

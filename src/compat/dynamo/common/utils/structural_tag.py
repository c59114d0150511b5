"""Facade: `dynamo.contract.requests.structural_tag` under the path of the guide."""

from dynamo.contract.requests.structural_tag import *  # noqa: F403
from dynamo.contract.requests.structural_tag import __all__ as __all__

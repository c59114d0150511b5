"""Facade: `dynamo.contract.requests.multimodal` under the path of the guide."""

from dynamo.contract.requests.multimodal import *  # noqa: F403
from dynamo.contract.requests.multimodal import __all__ as __all__

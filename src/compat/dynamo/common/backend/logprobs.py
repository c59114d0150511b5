"""Facade: `dynamo.contract.requests.logprobs` under the path of the guide."""

from dynamo.contract.requests.logprobs import *  # noqa: F403
from dynamo.contract.requests.logprobs import __all__ as __all__

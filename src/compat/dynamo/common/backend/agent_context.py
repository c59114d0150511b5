"""Facade: `dynamo.contract.requests.agent_context` under the path of the guide."""

from dynamo.contract.requests.agent_context import *  # noqa: F403
from dynamo.contract.requests.agent_context import __all__ as __all__

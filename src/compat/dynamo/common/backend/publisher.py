"""Facade: `dynamo.contract.kv_events` under the path of the guide."""

from dynamo.contract.kv_events import *  # noqa: F403
from dynamo.contract.kv_events import __all__ as __all__

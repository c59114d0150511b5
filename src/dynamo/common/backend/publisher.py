"""Facade: `dynamo.worker.kv_publishing.publisher` under the path of the guide."""

from dynamo.worker.kv_publishing.publisher import *  # noqa: F403
from dynamo.worker.kv_publishing.publisher import __all__ as __all__

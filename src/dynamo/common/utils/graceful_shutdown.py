"""Facade: `dynamo.worker.graceful_shutdown` under the path of the guide."""

from dynamo.worker.graceful_shutdown import *  # noqa: F403
from dynamo.worker.graceful_shutdown import __all__ as __all__

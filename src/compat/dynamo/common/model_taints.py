"""Facade: `dynamo.worker.taint_route` under the path of the guide."""

from dynamo.worker.taint_route import *  # noqa: F403
from dynamo.worker.taint_route import __all__ as __all__

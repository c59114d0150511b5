"""Facade: `dynamo.worker.worker` under the path of the guide."""

import sys

from dynamo.worker import worker as _room
from dynamo.worker.worker import *  # noqa: F403

# The very module, not a copy of its names: unit tests of engines patch `run.Worker` here.
sys.modules[__name__] = _room

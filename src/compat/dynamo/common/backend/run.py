"""Facade: `dynamo.worker.run` under the path of the guide."""

import sys

from dynamo.worker import run as _room
from dynamo.worker.run import *  # noqa: F403

# The very module, not a copy of its names: unit tests of engines patch `run.Worker` here.
sys.modules[__name__] = _room

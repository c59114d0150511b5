"""Facade: `dynamo.worker.graceful_shutdown` under the path of the guide."""

import sys

from dynamo.worker import graceful_shutdown as _room
from dynamo.worker.graceful_shutdown import *  # noqa: F403

# The very module, not a copy of its names: authors' tests patch its limits here.
sys.modules[__name__] = _room

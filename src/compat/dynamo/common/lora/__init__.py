"""Adapters on their way to an engine: where they are, and a cache of those that come from elsewhere."""

from dynamo.common.lora.manager import *  # noqa: F403
from dynamo.common.lora.manager import __all__ as __all__

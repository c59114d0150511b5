"""Facade: `dynamo.engines.sample.diffusion_engine` under the path of the guide."""

from dynamo.engines.sample.diffusion_engine import *  # noqa: F403
from dynamo.engines.sample.diffusion_engine import __all__ as __all__

"""Facade: `dynamo.contract.guided_json` under the path of the guide."""

from dynamo.contract.guided_json import *  # noqa: F403
from dynamo.contract.guided_json import __all__ as __all__

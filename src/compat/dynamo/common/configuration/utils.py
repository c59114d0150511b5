"""Facade: `dynamo.contract.flag_declarations` under the path of the guide."""

from dynamo.contract.flag_declarations import *  # noqa: F403
from dynamo.contract.flag_declarations import __all__ as __all__

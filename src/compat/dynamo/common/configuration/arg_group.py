"""Facade: the groups of `dynamo.contract.flag_declarations` under the native path."""

from dynamo.contract.flag_declarations import ArgGroup

__all__ = ["ArgGroup"]

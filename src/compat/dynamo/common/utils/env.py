"""Facade: `env_bool` of the native package."""

from dynamo.contract.flag_declarations import env_bool

__all__ = ["env_bool"]

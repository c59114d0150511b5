"""Facade: the flag variables of `dynamo.runtime.settings` under the native path."""

from dynamo.runtime.settings import env_bool

__all__ = ["env_bool"]

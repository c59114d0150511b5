"""Facade: the flag variables of `dynamo.runtime.base.settings` under the native path."""

from dynamo.runtime.base.settings import env_bool

__all__ = ["env_bool"]

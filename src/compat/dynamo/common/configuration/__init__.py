"""Facade: `dynamo.contract.flag_declarations` under the native path."""

from dynamo.contract.flag_declarations import (
    ArgGroup,
    ConfigBase,
    add_argument,
    add_negatable_bool_argument,
    env_or_default,
)

__all__ = ["ArgGroup", "ConfigBase", "add_argument", "add_negatable_bool_argument", "env_or_default"]

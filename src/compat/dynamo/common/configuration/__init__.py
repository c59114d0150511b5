"""Facade: `dynamo.contract.flag_declarations` under the native path."""

from pkgutil import extend_path

from dynamo.contract.flag_declarations import (
    ArgGroup,
    ConfigBase,
    add_argument,
    add_negatable_bool_argument,
    env_or_default,
)

__path__ = extend_path(__path__, __name__)  # a native layer beside this one may have more

__all__ = ["ArgGroup", "ConfigBase", "add_argument", "add_negatable_bool_argument", "env_or_default"]

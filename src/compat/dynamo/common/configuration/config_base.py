"""Facade: the configuration of `dynamo.contract.flag_declarations` under the native path."""

from dynamo.contract.flag_declarations import ConfigBase

__all__ = ["ConfigBase"]

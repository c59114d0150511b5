"""Facade: the endpoint types of `dynamo.contract.lower_level` under the native path."""

from dynamo.contract.lower_level import parse_endpoint_types

__all__ = ["parse_endpoint_types"]

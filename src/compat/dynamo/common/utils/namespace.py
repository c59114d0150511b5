"""Facade: the namespace of `dynamo.contract.lower_level` under the native path."""

from dynamo.contract.lower_level import get_worker_namespace

__all__ = ["get_worker_namespace"]

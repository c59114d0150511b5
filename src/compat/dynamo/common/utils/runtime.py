"""Facade: the runtime of `dynamo.contract.lower_level` under the native path."""

from dynamo.contract.lower_level import create_runtime, parse_endpoint, run_async

__all__ = ["create_runtime", "parse_endpoint", "run_async"]

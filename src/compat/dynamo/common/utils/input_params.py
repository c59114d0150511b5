"""Facade: names of `dynamo.contract.request_fields` under the path of the guide."""

from dynamo.contract.request_fields import InputParamManager, resolve_thinking_token_budget

__all__ = ["InputParamManager", "resolve_thinking_token_budget"]

"""Facade: names of `dynamo.contract.request_fields` under the path of the guide."""

from dynamo.contract.request_fields import normalize_finish_reason, trailing_stop_prefix_len

__all__ = ["normalize_finish_reason", "trailing_stop_prefix_len"]

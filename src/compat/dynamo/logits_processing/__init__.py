"""Facade: the shape of a logits processor, of `dynamo.contract.requests.logits`, under the native path."""

from dynamo.contract.requests.logits import BaseLogitsProcessor

__all__ = ["BaseLogitsProcessor"]

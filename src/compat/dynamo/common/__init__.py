"""What engines share: the backend contract (`common.backend`), constants and small conversions."""

from dynamo.contract.modes import DisaggregationMode, EmbeddingTransferMode

__all__ = ["DisaggregationMode", "EmbeddingTransferMode"]

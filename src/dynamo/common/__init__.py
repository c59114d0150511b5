"""What engines share: the backend contract (`common.backend`), constants and small conversions."""

from dynamo.common.constants import DisaggregationMode, EmbeddingTransferMode

__all__ = ["DisaggregationMode", "EmbeddingTransferMode"]

"""What a frontend counts: the families as a table, and the parts that count them."""

from dynamo.frontend.base.metrics.process import EventLoopMetrics, FrontendMetrics, PreparationMetrics

__all__ = ["EventLoopMetrics", "FrontendMetrics", "PreparationMetrics"]

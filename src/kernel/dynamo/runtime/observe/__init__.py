"""What a process reports of itself: log records, metrics, spans."""

__all__: list[str] = []

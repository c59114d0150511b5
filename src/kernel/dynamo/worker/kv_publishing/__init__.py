"""KV events and load reports: from the engine to the event plane, and again on demand."""

__all__: list[str] = []

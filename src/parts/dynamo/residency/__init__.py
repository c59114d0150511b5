"""Which of many models are in memory: when one is loaded, when one is unloaded, and which requests wait. Pure."""

__all__: list[str] = []

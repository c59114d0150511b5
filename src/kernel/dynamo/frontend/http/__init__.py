"""HTTP in and out: listener, limits, event streams, the group of processes on one port."""

__all__: list[str] = []

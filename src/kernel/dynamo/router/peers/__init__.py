"""What the routers of the same workers report to each other."""

__all__: list[str] = []

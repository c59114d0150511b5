"""The inspector: what this frontend has in flight, what became of the rest, and why, as the records of its API."""

__all__: list[str] = []

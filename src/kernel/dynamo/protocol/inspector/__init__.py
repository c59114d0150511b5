"""The inspector's API: what it shows of a running system, as JSON."""

__all__: list[str] = []

"""Child processes: start, backoff, rolling replacement."""

__all__: list[str] = []

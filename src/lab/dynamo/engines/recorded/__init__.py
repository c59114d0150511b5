"""An engine that answers from a recording."""

__all__: list[str] = []

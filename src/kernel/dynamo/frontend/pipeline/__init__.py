"""From a typed request to the events of its answer."""

__all__: list[str] = []

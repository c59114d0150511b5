"""Laboratory: simulation of whole clusters."""

__all__: list[str] = []

"""For trainers: which workers there are, and where each of them is paused and given new weights."""

__all__: list[str] = []

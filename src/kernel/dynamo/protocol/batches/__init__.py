"""The Files and Batches APIs as pure shapes: objects, lines of a batch, the states a batch passes."""

__all__: list[str] = []

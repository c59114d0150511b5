"""Readers of the worker's request and writers of the engine's chunk, one file per subject."""

__all__: list[str] = []

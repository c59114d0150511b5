"""Pods of plain vLLM as workers: nothing of this package runs in them."""

__all__: list[str] = []

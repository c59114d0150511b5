"""Admission: limits of the process and of each model."""

__all__: list[str] = []

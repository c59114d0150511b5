"""One file per HTTP API: decode, validate, render."""

__all__: list[str] = []

"""The guide's sample engines."""

__all__: list[str] = []

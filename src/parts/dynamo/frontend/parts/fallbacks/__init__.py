"""Other models in place of one that fails before its first token."""

__all__: list[str] = []

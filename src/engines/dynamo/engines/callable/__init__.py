"""Any Python callable of text or of token ids as an engine."""

__all__: list[str] = []

"""The API of Ollama."""

__all__: list[str] = []

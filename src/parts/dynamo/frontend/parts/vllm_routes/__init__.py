"""The routes of vLLM that its clients call beside those of OpenAI."""

__all__: list[str] = []

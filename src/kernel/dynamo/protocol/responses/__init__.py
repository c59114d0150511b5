"""OpenAI's Responses API as values: requests, items, tools, the response object and its events. Pure: no socket, no clock."""

__all__: list[str] = []

"""A KV-aware router in front of the workers of any endpoint, as a library and as `python -m dynamo.router`."""

__all__: list[str] = []

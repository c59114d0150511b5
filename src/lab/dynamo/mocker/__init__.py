"""An engine without a model that behaves like a real one: scheduler, KV cache and the time that work takes."""

__all__: list[str] = []

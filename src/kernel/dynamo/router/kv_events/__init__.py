"""The KV events of the workers, whole and in order, for whoever indexes them."""

__all__: list[str] = []

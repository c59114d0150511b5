"""The KV events of the workers, whole and in order, for an index."""

__all__: list[str] = []

"""The kv router mode: a `KvRouter` beside each pool, its indexes, its decisions in words, and what requests pass before it."""

__all__: list[str] = []

"""`dynamo doctor`: what may be wrong with a machine, its settings and what they lead to."""

__all__: list[str] = []

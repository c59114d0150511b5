"""The workers of one model and role: which there are, which are held or busy, and the choice among them."""

__all__: list[str] = []

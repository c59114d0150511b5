"""The keys in service, what they may use, and what they have used."""

__all__: list[str] = []

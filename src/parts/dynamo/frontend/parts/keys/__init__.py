"""Who may use a frontend: the keys in service, and what they have used."""

__all__: list[str] = []

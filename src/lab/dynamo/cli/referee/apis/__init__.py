"""The checks of the APIs beside chat and completions, one or two modules each."""

__all__: list[str] = []

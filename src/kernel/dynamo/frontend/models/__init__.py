"""The models of the cluster: directory, cards, files."""

__all__: list[str] = []

"""Models that are loaded when a request for them comes, as a part of the frontend."""

__all__: list[str] = []

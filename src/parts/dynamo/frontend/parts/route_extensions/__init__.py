"""Routes that programs add to the frontend (docs/route-extensions.md)."""

__all__: list[str] = []

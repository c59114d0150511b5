"""The APIs whose answers are made media: pictures, sound and videos."""

__all__: list[str] = []

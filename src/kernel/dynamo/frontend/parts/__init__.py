"""What a frontend can do beside answering requests: one folder for each part."""

__all__: list[str] = []

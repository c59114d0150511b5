"""What a frontend keeps of its requests: recordings in files, and bundles of those that failed in memory."""

__all__: list[str] = []

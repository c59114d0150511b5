"""What drives an engine: lifecycle, registration, serving of requests, cancellation, shutdown."""

__all__: list[str] = []

"""What every room of the frontend needs: offloading, ASGI, request ids, stage times, the peers of a process, metrics."""

__all__: list[str] = []

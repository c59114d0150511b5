"""A small HTTP/1.1 server for ASGI applications, with limits on everything that a client may cost."""

__all__: list[str] = []

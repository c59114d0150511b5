"""As much of gRPC over HTTP/2 as a picker serves, in Python alone: a picker needs no other package for it."""

__all__: list[str] = []

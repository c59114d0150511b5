"""One process calls another: the context of a request, the request and event planes, instances, handlers, their health."""

__all__: list[str] = []

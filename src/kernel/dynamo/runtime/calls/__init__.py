"""One process calls another: the context of a request, the request and event planes, instances, handlers, their health."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # the native wire is in `src/compat`

__all__: list[str] = []

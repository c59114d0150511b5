"""What drives an engine: lifecycle, registration, serving of requests, cancellation, shutdown."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # some of the helpers of the native system are in `src/compat`

__all__: list[str] = []

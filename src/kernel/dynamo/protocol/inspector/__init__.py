"""The inspector's API: what it shows of a running system, as JSON. All but the views lies with the inspector."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

__all__: list[str] = []

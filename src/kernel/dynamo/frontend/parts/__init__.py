"""What a frontend can do beside answering requests: one folder for each part."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # the inspector lies in another source root

__all__: list[str] = []

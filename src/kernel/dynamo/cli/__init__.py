"""The `dynamo` command. Nothing here is a library: start at `main`."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # the commands of the other source roots

__all__: list[str] = []

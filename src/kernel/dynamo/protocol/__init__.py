"""The messages: records between processes and the shapes of the HTTP surface. Pure: no socket, no clock, no
environment. Import from the module that defines it: `records`, `openai`."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

__all__: list[str] = []

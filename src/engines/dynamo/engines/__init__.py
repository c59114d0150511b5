"""Engines that come with the package; each is only a user of the contract."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # the one that answers from recordings lies in another source root

__all__: list[str] = []

"""Engines that come with the package; each is only a user of the contract."""

__all__: list[str] = []

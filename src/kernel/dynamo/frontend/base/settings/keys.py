"""Where API keys come from."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where the keys of a frontend come from; all None: there are none, and nothing is asked for one."""

    file: str | None = None
    admin_file: str | None = None
    key: str | None = None
    """A key in the environment: it may do everything on the routes of the API."""

    @property
    def protect_clients(self) -> bool:
        """Whether the routes of the API need a key."""
        return self.file is not None or self.key is not None

    @property
    def exist(self) -> bool:
        return self.protect_clients or self.admin_file is not None

"""One key in service: what it may use, from where, and until when."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from dynamo.frontend.base.access import KeyRole, RouteGroup, key_rejection
from dynamo.frontend.parts.keys.rules.records import KeyRecord, Network
from dynamo.protocol.openai.errors import RequestRejected

ENVIRONMENT_ID: Final = "env"  # of the key that DYN_API_KEY holds


class Identity:
    """One key in service. Shared by all its requests, and never changed: a file that is read again makes new ones."""

    __slots__ = ("_expires_at", "_groups", "_networks", "id", "is_admin", "is_always_valid", "owner", "record")

    def __init__(self, record: KeyRecord, *, is_admin: bool = False, expires_at: float | None = None) -> None:
        """`is_admin`: its role may be that of a user, as it stands in the file of the admins. `expires_at`: seconds since the epoch, where that is before its own end."""
        self.record = record
        self.id = record.id
        self.owner = record.owner
        """Whose files, batches and stored responses it sees."""
        self.is_admin = (is_admin and not record.role.only_inspects) or record.role is KeyRole.ADMIN
        self._networks: Sequence[Network] = record.networks()
        self._groups = frozenset(group for group in RouteGroup if record.allows_group(group))
        own_end = None if record.expires is None else record.expires.timestamp()
        self._expires_at = min([end for end in (expires_at, own_end) if end is not None], default=None)

        self.is_always_valid = record.enabled and self._expires_at is None
        """Whether `check_valid` never refuses it."""

    @property
    def shown_name(self) -> str:
        """What people call the key: its name, else its id."""
        return self.record.name or self.id

    @property
    def priority(self) -> int | None:
        """The highest priority of its requests; None: any."""
        return self.record.priority

    @property
    def sees_operations(self) -> bool:
        """Whether it may see what concerns all clients: metrics, and the details of `/health`."""
        return RouteGroup.METRICS in self._groups or self.is_admin

    def is_expired(self, now: float) -> bool:
        """Return whether it has expired; `now` is in seconds since the epoch."""
        return self._expires_at is not None and now >= self._expires_at

    def check_valid(self, now: float) -> None:
        """Raise the 401 of a key that is disabled or expired."""
        if not self.record.enabled:
            raise key_rejection("key_disabled", "This API key is disabled")
        if self._expires_at is not None and now >= self._expires_at:
            raise key_rejection("key_expired", "This API key has expired")

    def check_address(self, address: str | None) -> None:
        """Raise the 403 of a key that is used from an address outside its networks; None: a caller in this process."""
        if not self._networks or address is None:
            return
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            found = None  # a Unix socket, for instance: no network holds it
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if found is None or not any(found in network for network in self._networks):
            raise _forbidden("This API key may not be used from this address")

    def check_group(self, group: RouteGroup) -> None:
        """Raise the 403 of a key that may not use a group of routes."""
        if group not in self._groups:
            raise _forbidden(f"This API key may not use the {group} routes")

    def check_admin(self) -> None:
        """Raise the 403 of a key that may not use the admin routes."""
        if not self.is_admin:
            raise _forbidden("This API key may not use the admin routes")

    @property
    def inspector_role(self) -> KeyRole | None:
        """What it may do at the inspector; None: nothing."""
        if self.is_admin:
            return KeyRole.ADMIN
        return self.record.role if self.record.role.only_inspects else None

    def check_inspector(self, *, acts: bool) -> None:
        """Raise the 403 of a key that may not view the inspector, or, with `acts`, may not act there."""
        role = self.inspector_role
        if role is None:
            raise _forbidden(
                "This API key may not use the inspector: its role is not viewer, content, operator or admin"
            )
        if acts and role not in (KeyRole.OPERATOR, KeyRole.ADMIN):
            raise _forbidden(f"This API key may look and not act: its role is {role}, not operator or admin")

    def allows_model(self, name: str) -> bool:
        """Return whether it may use, and see, the model of this name."""
        return self.record.models is None or self.record.allows_model(name)


def _forbidden(message: str) -> RequestRejected:
    return RequestRejected(403, message, code="insufficient_permissions")

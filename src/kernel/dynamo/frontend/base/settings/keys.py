"""Where API keys come from, what their use is written to, and how far the logs of requests go."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from dynamo.settings.readers import (
    SettingReader,
    integer,
    switch,
    text,
    words,
)
from dynamo.settings.table import setting

_ACCESS: Final = "access"


_networks: Final = SettingReader(
    lambda given: tuple(map(ipaddress.ip_network, words.parse(given))),
    show=lambda networks: ",".join(map(str, networks)),
    metavar="CIDR",
)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where the keys of a frontend come from; all None: no route needs a key."""

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


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Keys, their usage, and the logs of requests; None means off."""

    # fmt: off
    keys_file: str | None = setting(None, "DYN_KEYS", text,
        "File of [API keys](keys.md), TOML or JSON: every route needs one of them, but for `/health`, `/ready`, `/live`, "
        "`/ping` and `/version`. Read again when it changes", flag="--keys", dest="keys_file", group=_ACCESS)
    api_key: str | None = setting(None, "DYN_API_KEY", text,
        "One API key, of at least 16 characters, that may use every route of the API; alone, or beside `--keys`",
        secret=True)
    admin_keys_file: str | None = setting(None, "DYN_ADMIN_KEYS", text,
        "File of the keys for the admin routes. Without one the admin port is at a loopback address only",
        flag="--admin-keys", dest="admin_keys_file", group=_ACCESS)
    usage_db: str | None = setting(None, "DYN_USAGE_DB", text,
        "File of SQLite with [what keys have used](keys.md#what-keys-use); budgets go on with it when the frontend is "
        "started again", flag="--usage-db", group=_ACCESS)
    divide_limits: bool = setting(True, "DYN_DIVIDE_LIMITS", switch,
        "Divide limits and budgets of keys among [the frontends of a cluster](keys.md#several-processes-and-frontends), "
        "where discovery is etcd. Off: each frontend enforces the whole limit", flag="--divide-limits", group=_ACCESS)
    usage_keep_days: int = setting(90, "DYN_USAGE_KEEP_DAYS", integer(1),
        "How many days the minutes in that file are kept")
    access_log: str | None = setting(None, "DYN_ACCESS_LOG", text,
        "File for [one JSON line for each request](keys.md#logs), without content; `-`: standard error",
        flag="--access-log", group=_ACCESS)
    audit_log: str | None = setting(None, "DYN_AUDIT_LOG", text,
        "File for one JSON line for each action on an admin route, on the disk before the answer",
        flag="--audit-log", group=_ACCESS)
    open_metrics: bool = setting(False, "DYN_OPEN_METRICS", switch,
        "`/metrics` needs no key, also where the other routes do", flag="--open-metrics", group=_ACCESS)
    trusted_proxies: tuple[Network, ...] = setting((), "DYN_TRUSTED_PROXIES", _networks,
        "Networks of proxies whose `X-Forwarded-For` is believed, separated by commas", flag="--trusted-proxies",
        group=_ACCESS, repeats=True)
    # fmt: on

    @property
    def key_sources(self) -> KeySources:
        """Where the API keys come from."""
        return KeySources(self.keys_file, self.admin_keys_file, self.api_key)

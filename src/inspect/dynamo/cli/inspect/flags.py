"""The inspector that a command calls: the flags that `top`, `status` and `doctor` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import urlsplit

from dynamo.cli.api_client import DEFAULT_PORT
from dynamo.cli.inspect.client import InspectorClient
from dynamo.runtime.http.inspector_token import InspectorAccess, find_access
from dynamo.settings.readers import placeholder, port, text
from dynamo.settings.table import setting


@dataclass(frozen=True, slots=True)
class InspectFlags:
    """The frontend to call, and the key for it."""

    # fmt: off
    url: str = setting("", None, placeholder("URL", text), "The frontend", flag="--url", shown="this machine, at `DYN_HTTP_PORT`")
    port: int = setting(DEFAULT_PORT, "DYN_HTTP_PORT", port, "Where the frontend listens, without `--url`")
    key: str | None = setting(None, "DYN_API_KEY", text, "An admin key of that frontend; without one the key is taken that a frontend of this machine left for its user",
        flag="--key", secret=True)
    # fmt: on

    def settle(self, env: Mapping[str, str]) -> Self:
        """Find the frontend of this machine where no other is named, and its token where no key is given."""
        url = self.url or f"http://127.0.0.1:{self.port}"
        access = None if self.key else _access(url, env)
        return replace(self, url=url) if access is None else replace(self, url=access.url, key=access.token)

    def client(self) -> InspectorClient:
        """Return a client of that frontend. Raises UsageError."""
        return InspectorClient(self.url, self.key)


def _access(url: str, env: Mapping[str, str]) -> InspectorAccess | None:
    """Return how a frontend of this machine is reached by its user's tools; a token is sent nowhere else."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        return None  # the client will report what is wrong with it
    is_local = parts.hostname in ("127.0.0.1", "::1", "localhost")
    return find_access(port or 80, env) if is_local else None

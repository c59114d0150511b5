"""The settings of the inspector."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.settings.readers import switch, text
from dynamo.settings.table import setting

_GROUP = "inspector"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorSettings:
    """What the inspector shows, and what it may do."""

    # fmt: off
    is_on: bool = setting(True, "DYN_INSPECT", switch,
        "Serve the [inspector](inspector.md) where the admin routes are served", flag="--inspect", group=_GROUP)
    is_read_only: bool = setting(False, "DYN_INSPECT_READ_ONLY", switch,
        "The inspector shows, and does nothing: no request is aborted, no worker drained", flag="--inspect-read-only",
        dest="inspect_read_only", group=_GROUP)
    shows_content: bool = setting(False, "DYN_INSPECT_CONTENT", switch,
        "Keys with the role `content` or `admin`, and the token, may see what clients wrote: prompts and answers of requests "
        "in flight, in the texts of errors, and in bundles that `--keep-failed-content` kept", flag="--inspect-content", dest="inspect_content", group=_GROUP)
    advertise: str | None = setting(None, "DYN_ADMIN_ADVERTISE", text,
        "`http://HOST:PORT` by which the other frontends of the cluster reach the admin routes of this one. It is published in "
        "discovery, and [their inspectors](inspector.md#several-frontends) show and abort its requests, too. Needs "
        "`DYN_ADMIN_PEER_KEY`", flag="--admin-advertise", dest="admin_advertise", group=_GROUP)
    peer_key: str | None = setting(None, "DYN_ADMIN_PEER_KEY", text,
        "A secret of at least 16 characters that all frontends of the cluster share: with it their inspectors ask each other",
        secret=True)
    # fmt: on

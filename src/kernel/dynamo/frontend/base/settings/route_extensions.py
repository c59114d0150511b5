"""The settings of route extensions: which programs add routes to the frontend."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.settings.readers import SettingReader
from dynamo.settings.table import setting


@dataclass(frozen=True, kw_only=True)
class RouteExtensionSettings:
    """Where the routes come from."""

    # fmt: off
    route_extensions: tuple[str, ...] = setting((), "DYN_FRONTEND_ROUTE_EXTENSIONS",
        SettingReader(lambda given: tuple(given.split()), show=" ".join, metavar="NAME|MODULE:FUNCTION"),
        "Programs that [add routes](route-extensions.md), by entry point or function; may be repeated",
        flag="--frontend-route-extension", dest="route_extensions", group="http", repeats=True)
    # fmt: on

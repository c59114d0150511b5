"""The settings of a frontend, read once at start: environment and flags, read at the edge into one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from dynamo.frontend.base.settings.batches import BatchesSettings
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.frontend.base.settings.stored_responses import (
    StoredResponseSettings,
)
from dynamo.frontend.http.settings import ROUTES, HttpSettings
from dynamo.placement.policies.kv_policies import is_of_user
from dynamo.runtime.base.addresses import bind_host
from dynamo.runtime.base.settings import FromEnvironment
from dynamo.settings.readers import (
    SettingReader,
    switch,
)
from dynamo.settings.table import declared, section, setting

# The settings of route extensions: which programs add routes to the frontend.


@dataclass(frozen=True, kw_only=True)
class RouteExtensionSettings:
    """Where the routes come from."""

    # fmt: off
    route_extensions: tuple[str, ...] = setting((), "DYN_FRONTEND_ROUTE_EXTENSIONS",
        SettingReader(lambda given: tuple(given.split()), show=" ".join, metavar="NAME|MODULE:FUNCTION"),
        "Programs that [add routes](route-extensions.md), by entry point or function; may be repeated",
        flag="--frontend-route-extension", dest="route_extensions", group="http", repeats=True)
    # fmt: on


_OTHER: Final = "other"

TOKENIZER_CACHE: Final = declared(
    "DYN_TOKENIZER_CACHE", switch, "Remember the token ids of long shared prompts", unset=True
)
DUMP_CONFIG_TO: Final = declared(
    "DYN_DUMP_CONFIG_TO",
    SettingReader(Path, metavar="FILE"),
    "Write the settings to this file, as JSON, without secrets",
    flag="--dump-config-to",
    group=_OTHER,
)


@dataclass(frozen=True, kw_only=True)
class FrontendSettings(BatchesSettings, StoredResponseSettings, RouteExtensionSettings, HttpSettings, FromEnvironment):
    """All settings of a frontend: those of its rooms, each of which reads its own record, and of its parts."""

    # fmt: off
    media: MediaSettings = section(MediaSettings)
    # fmt: on

    def settle(self, env: Mapping[str, str]) -> Self:
        """Choose the address of the API: the configured one, else loopback where discovery is of one machine.

        `--load-aware` is a way of the kv router mode.

        The status server is a worker's: a frontend shares its machine, not its port. Raises ValueError for a flag that the
        router mode has no use for.
        """
        router_mode = "kv" if self.kv_router.load_aware else self.router_mode
        if self.kv_router.router_session_affinity_ttl_secs is not None and router_mode != "kv":
            raise ValueError(f"--router-session-affinity-ttl-secs needs --router-mode kv, got {router_mode}")
        if router_mode != "kv" and (self.kv_router.shadow_policy is not None or is_of_user(self.kv_router.policy)):
            raise ValueError(f"a policy of your own and --shadow-policy need --router-mode kv, got {router_mode}")
        return replace(
            self,
            router_mode=router_mode,
            http_host=bind_host(self.store, self.http_host, "0.0.0.0"),
            paths={name: made.value(env) for name, made in ROUTES.items()},
            tokenizer_cache_bytes=self.tokenizer_cache_bytes if TOKENIZER_CACHE.value(env) else 0,
            runtime=replace(self.runtime, system=replace(self.runtime.system, port=-1)),
        )

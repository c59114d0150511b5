"""The settings of `python -m dynamo.router`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.busy_settings import BusySettings
from dynamo.settings.readers import SettingReader, integer
from dynamo.settings.table import section, setting

_GROUP: Final = "router"


def _endpoint(given: str) -> str:
    parts = given.removeprefix("dyn://").split(".")
    if len(parts) != 3 or not all(parts) or "/" in given.removeprefix("dyn://"):
        raise ValueError(f"an endpoint is NAMESPACE.COMPONENT.ENDPOINT, got {given!r}")
    return ".".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterServiceSettings(BusySettings):
    """What an operator sets for the standalone router."""

    # fmt: off
    endpoint: str | None = setting(None, "DYN_ROUTER_ENDPOINT", SettingReader(_endpoint, metavar="PATH"),
        "The workers' endpoint, such as `prod.prefill.generate`. Needed. The router serves "
        "`{namespace}.router.generate`, `.best_worker_id` and `.get_overlap_scores`", flag="--endpoint", group=_GROUP)
    block_size: int = setting(128, "DYN_ROUTER_BLOCK_SIZE", integer(1),
        "Tokens of a KV block; must be that of the workers", flag=("--router-block-size", "--block-size"), group=_GROUP)
    # fmt: on
    kv: KvRouterSettings = section(KvRouterSettings)

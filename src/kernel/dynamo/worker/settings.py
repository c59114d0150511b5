"""What a worker reads that no flag sets, beside the times of its end (`ShutdownTimes`): variables, and the files that name its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dynamo.contract.config import WorkerConfig
from dynamo.errors import InvalidArgument
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.settings.readers import number, one_of, switch, text
from dynamo.settings.table import declared, setting_of

logger = logging.getLogger(__name__)

ALLOW_DOWNLOAD: Final = setting_of(WorkerConfig, "allow_download")  # also for workers that parse no command line
VALIDATE: Final = declared(
    "DYN_BACKEND_VALIDATE", switch, "Also fail streams that say something after their last chunk", unset=False
)
MAP_BUILTIN_ERRORS: Final = declared(
    "DYN_BACKEND_MAP_BUILTIN_ERRORS",
    switch,
    "Python's own exceptions get the categories of 1.6.1; see [errors](errors.md)",
    unset=False,
)
SELF_HOST_METADATA: Final = declared(
    "DYN_SELF_HOST_METADATA",
    switch,
    "Offer the model's files on the status server, where there is one",
    unset=True,
)
RL_ENDPOINT: Final = declared(
    "DYN_RL_ENDPOINT", text, "Name of the reinforcement-learning directory endpoint", unset="rl"
)


# Where a worker is, read from the files that its pod gets, and within which of these places its KV blocks are to stay.
#
# The directory has one file for each domain, such as `zone` or `rack`; its content is this worker's place in it. The files may
# come a moment after the process: a worker without its place would be one that blocks may be sent to from anywhere.

MAX_DOMAINS: Final = 64
MAX_VALUE_BYTES: Final = 253  # of a label's value, with room
WAIT_SECONDS: Final = 60.0  # for the file of the domain; labels are projected after the pod is scheduled
LOOK_SECONDS: Final = 0.5

TOPOLOGY_ENABLED: Final = declared(
    "DYN_TOPOLOGY_ENABLED",
    switch,
    "Advertise where this worker is; see [disaggregation](disaggregation.md#where-blocks-may-be-sent)",
    unset=False,
)
TOPOLOGY_MOUNT_PATH: Final = declared(
    "DYN_TOPOLOGY_MOUNT_PATH",
    text,
    "The directory with one file for each domain: its name is the domain's, its content this worker's place",
    unset="/etc/dynamo/topology",
)
KV_TRANSFER_DOMAIN: Final = declared(
    "DYN_KV_TRANSFER_DOMAIN", text, "The domain within which the KV blocks of a prefill worker stay"
)
KV_TRANSFER_ENFORCEMENT: Final = declared(
    "DYN_KV_TRANSFER_ENFORCEMENT",
    one_of("required", "preferred"),
    "Whether a decode worker must be in the same place, or should",
    unset="required",
)
KV_TRANSFER_PREFERRED_WEIGHT: Final = declared(
    "DYN_KV_TRANSFER_PREFERRED_WEIGHT",
    number(0, 1),
    "With `preferred`: how much the same place counts in the kv router mode",
)

TOPOLOGY_VARIABLES: Final = (
    TOPOLOGY_ENABLED, TOPOLOGY_MOUNT_PATH, KV_TRANSFER_DOMAIN, KV_TRANSFER_ENFORCEMENT, KV_TRANSFER_PREFERRED_WEIGHT,
)  # fmt: skip


async def describe_place(
    record: ModelRuntimeConfig, env: Mapping[str, str], *, wait_seconds: float = WAIT_SECONDS
) -> None:
    """Add to `record` where this worker is, if it is to report it.

    Raises InvalidArgument when the domain is not named, or its file cannot be read or has not come in time.
    """
    if not TOPOLOGY_ENABLED.value(env):
        return
    domain, enforcement = KV_TRANSFER_DOMAIN.value(env), KV_TRANSFER_ENFORCEMENT.value(env)
    if not domain:
        raise InvalidArgument("DYN_TOPOLOGY_ENABLED needs DYN_KV_TRANSFER_DOMAIN, the domain that blocks stay within")
    record.topology_domains = await _places(Path(TOPOLOGY_MOUNT_PATH.value(env)), domain, wait_seconds)
    record.kv_transfer_domain = domain
    record.kv_transfer_enforcement = enforcement
    if enforcement == "preferred":
        record.kv_transfer_preferred_weight = KV_TRANSFER_PREFERRED_WEIGHT.value(env)


async def _places(directory: Path, domain: str, wait_seconds: float) -> dict[str, str]:
    """Wait until the file of `domain` has a content; return all domains."""
    deadline = asyncio.get_running_loop().time() + wait_seconds
    found = await asyncio.to_thread(_read, directory)
    if domain not in found:
        logger.info("waiting up to %g s for the topology domain %s in %s", wait_seconds, domain, directory)
    while domain not in found:
        if asyncio.get_running_loop().time() >= deadline:
            raise InvalidArgument(
                f"DYN_KV_TRANSFER_DOMAIN={domain}: {directory} has no file of that name with a content after "
                f"{wait_seconds:g} s"
            )
        await asyncio.sleep(LOOK_SECONDS)
        found = await asyncio.to_thread(_read, directory)
    return found


def _read(directory: Path) -> dict[str, str]:
    """Read the domains there are. Hidden files are not domains: Kubernetes keeps its own there."""
    try:
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith(".") and path.is_file())
    except OSError:
        return {}
    if len(paths) > MAX_DOMAINS:
        raise InvalidArgument(f"DYN_TOPOLOGY_MOUNT_PATH={directory}: at most {MAX_DOMAINS} domains, found {len(paths)}")
    found = {}
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                value = file.read(MAX_VALUE_BYTES + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the topology domain {path} cannot be read: {error}") from error
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidArgument(f"the topology domain {path} is longer than {MAX_VALUE_BYTES} characters")
        if value:
            found[path.name] = value
    return found

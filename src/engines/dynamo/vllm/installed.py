"""The installed vLLM: whether it is there, and of a release that this package knows."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.settings.foreign import NO_CREATED_SERIES

OLDEST: Final = (0, 20)
NEWEST: Final = (0, 33)

# Read by vLLM when it is imported, and by the processes that it starts. What the operator sets stays.
DEFAULTS: Final = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing leaves the machine
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit the event loop's threads half-way
    str(NO_CREATED_SERIES.variable): "1",  # else every counter comes twice
}


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what vLLM reads at its import, where the operator has not."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def import_vllm() -> Any:
    """Import the package `vllm`, which takes seconds. Raises InvalidArgument where it is missing or of another release."""
    prepare_environment()
    try:
        import vllm
    except ImportError as error:
        if error.name == "vllm":
            raise InvalidArgument(
                "vLLM is not installed in this environment; see docs/engines.md for how (GPU: pip install vllm)"
            ) from error
        raise InvalidArgument(f"vLLM is installed, but cannot be imported: {error}") from error
    check_version(str(getattr(vllm, "__version__", "")))
    return vllm


def check_version(version: str) -> None:
    """Raise InvalidArgument for a release that this package does not know.

    `version` is `vllm.__version__`: builds of vLLM have other names as distributions.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise InvalidArgument(f"vLLM has the version {version!r}, which cannot be read; {_known()}")
    release = int(found[1]), int(found[2])
    if not OLDEST <= release <= NEWEST:
        raise InvalidArgument(f"vLLM {version} is installed; {_known()}")


def _known() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"dynamo.vllm works with vLLM {oldest} to {newest}"

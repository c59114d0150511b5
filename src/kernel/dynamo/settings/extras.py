"""The command that installs what an extra of this distribution brings."""

from __future__ import annotations

import functools
import re
from importlib import metadata
from typing import Final

DISTRIBUTION: Final = "dynamo-unified"
_REQUIREMENT: Final = re.compile(r"\s*([^;]+?)\s*;.*extra\s*==\s*['\"]([\w-]+)['\"]")


@functools.cache
def install_command(*extras: str) -> str:
    """Return a `pip install` of the packages that these extras bring.

    The packages are named, and not this distribution with its extra: pip finds them also where this distribution came from a
    wheel or a checkout and no index has it. They are read from the metadata of the installed distribution.
    """
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        required = []
    found = [match for line in required if (match := _REQUIREMENT.fullmatch(line)) is not None]
    packages = [package for extra in extras for package, of in (match.groups() for match in found) if of == extra]
    if not packages:
        return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
    return "pip install " + " ".join(f"'{package}'" for package in dict.fromkeys(packages))

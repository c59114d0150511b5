"""Where the running `dynamo` was installed from, in the words that make pip install the same again."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

import dynamo

DISTRIBUTION: Final = "dynamo-unified"
CHECKOUT: Final = Path(dynamo.__file__ or "").resolve().parents[3]  # CHECKOUT/src/kernel/dynamo/__init__.py


@dataclass(frozen=True, slots=True)
class Installation:
    """The version of this distribution, and what `pip install` needs to find it."""

    version: str
    pip_arguments: str  # quoted for a shell; empty: an index has it

    @classmethod
    def find(cls) -> Self:
        """Read the metadata of the installed distribution, or of the checkout that the package was imported from."""
        try:
            distribution = metadata.distribution(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return cls._of_checkout(CHECKOUT)
        origin = distribution.read_text("direct_url.json")
        return cls(distribution.version, pip_arguments(json.loads(origin)) if origin else "")

    @classmethod
    def _of_checkout(cls, root: Path) -> Self:
        try:
            project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        except (OSError, KeyError, tomllib.TOMLDecodeError):
            return cls(dynamo.__version__, "")
        return cls(project["version"], f"-e {shlex.quote(str(root))}")


def pip_arguments(origin: dict[str, Any]) -> str:
    """Turn the record that pip keeps of a direct install (PEP 610) into arguments of `pip install`."""
    url: str = origin["url"]
    if "vcs_info" in origin:
        found = origin["vcs_info"]
        return shlex.quote(f"{DISTRIBUTION} @ {found['vcs']}+{url}@{found['commit_id']}")
    if urlsplit(url).scheme == "file":
        path = shlex.quote(unquote(urlsplit(url).path))
        return f"-e {path}" if origin.get("dir_info", {}).get("editable") else path
    return shlex.quote(f"{DISTRIBUTION} @ {url}")

"""Checks of what is installed, and of what dead processes left."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from dynamo.cli.doctor.diagnosis import Diagnosis, Examined
from dynamo.cli.installation import Installation
from dynamo.runtime.http.inspector_token import InspectorAccess, token_directory

LIBRARIES: Final = (
    "msgspec",
    "httptools",
    "uvloop",
    "tokenizers",
    "pyzmq",
    "textual",
    "aiohttp",
    "nats-py",
    "llguidance",
)
ENGINES: Final = ("vllm", "sglang", "tensorrt_llm", "xllamacpp", "transformers", "torch")


def versions(_: Examined) -> Iterator[Diagnosis]:
    """Name the versions of what matters."""
    yield Diagnosis.ok(
        f"dynamo {Installation.find().version}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    )
    yield Diagnosis.ok(f"libraries: {_named(LIBRARIES)}")
    yield Diagnosis.ok(f"engines: {_named(ENGINES)}")


def _named(packages: tuple[str, ...]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none installed"


def leftovers(examined: Examined) -> Iterator[Diagnosis]:
    """Search for token files of frontends that have gone."""
    folder = token_directory(examined.env)
    found = sorted(folder.glob("inspect-*.json")) if folder.is_dir() else []
    for path in found:
        yield token_file(path, examined.proc)
    if not found:
        yield Diagnosis.ok("no frontend left anything behind")


def token_file(path: Path, proc: Path) -> Diagnosis:
    """Judge one token file: its process should run, and no other user should read it."""
    try:
        access = msgspec.json.decode(path.read_bytes(), type=InspectorAccess)
        mode = path.stat().st_mode & 0o077
    except (OSError, msgspec.MsgspecError) as error:
        return Diagnosis.warn(f"{path} cannot be read: {error}", "remove it")
    if mode:
        return Diagnosis.bad(
            f"{path} can be read by others, and its token is not believed",
            f"chmod 600 {path}, and restart the frontend",
        )
    if not access.is_of_here:
        return Diagnosis.ok(
            f"{path} is of another machine or container ({access.host or 'an older version'}), and not judged"
        )
    if not _runs(access.pid, proc):
        return Diagnosis.warn(f"{path} is of process {access.pid}, which has gone", "remove it")
    return Diagnosis.ok(f"{access.url} is served by process {access.pid}")


def _runs(pid: int, proc: Path) -> bool:
    if proc.is_dir():
        return (proc / str(pid)).is_dir()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

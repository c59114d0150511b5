"""`dynamo serve --reload`: replace the workers when a source file of the engine changes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["MAX_FILES", "changed_files", "source_times", "watch_sources"]

POLL_SECONDS: Final = 0.5
MAX_FILES: Final = 5000  # a home directory by mistake must not cost a core
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})


async def watch_sources(directory: Path, on_change: Callable[[str], None]) -> None:
    """Call `on_change(text)` each time Python files below `directory` have changed and then held still for one poll.

    Editors and `git checkout` write several files in a row: one call for all of them. Their bytecode files are removed
    first. Never returns.
    """
    seen = source_times(directory)
    while True:
        await asyncio.sleep(POLL_SECONDS)
        now = source_times(directory)
        changed = changed_files(seen, now)
        if not changed:
            continue
        while True:
            await asyncio.sleep(POLL_SECONDS)
            later = source_times(directory)
            if later == now:
                break
            now = later
        changed, seen = changed_files(seen, now), now
        if changed:
            _remove_bytecode(directory, changed)
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            on_change(f"{changed[0]}{more} changed")


def source_times(directory: Path) -> dict[str, int]:
    """Return the modification time (ns) of each Python file below `directory`, at most `MAX_FILES` of them."""
    times: dict[str, int] = {}
    for path in _sources(directory):
        if len(times) >= MAX_FILES:
            break
        try:
            times[os.path.relpath(path, directory)] = os.stat(path).st_mtime_ns
        except FileNotFoundError:  # removed since it was listed
            continue
    return times


def changed_files(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the files that are new, removed or written since."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _remove_bytecode(directory: Path, names: list[str]) -> None:
    """Make Python compile these files again.

    It takes a bytecode file for current when the source has the same size and the same second of modification, and two
    saves within a second are common.
    """
    for name in names:
        with contextlib.suppress(OSError):  # none was written, or the directory cannot be written to
            os.unlink(importlib.util.cache_from_source(os.path.join(directory, name)))


def _sources(directory: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )
        yield from (os.path.join(folder, name) for name in sorted(files) if name.endswith(".py"))

"""Where the source lies: one package, `dynamo`, over the six roots of `src` (see `src/README.md`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "ROOTS", "WINGS", "located", "name_in_package", "source_files", "wing_of"]

ROOT: Final = Path(__file__).resolve().parent.parent
WINGS: Final = ("kernel", "parts", "engines", "lab", "inspect", "compat")
ROOTS: Final = tuple(ROOT / "src" / wing for wing in WINGS)


def source_files(below: str = "") -> Iterator[Path]:
    """Yield every Python file of the package, or of one of its folders (`protocol/openai`), sorted within each wing."""
    for root in ROOTS:
        yield from sorted((root / "dynamo" / below).rglob("*.py"))


def name_in_package(path: Path) -> str:
    """Return the path of a source file below `dynamo`, whichever wing it lies in: `runtime/client.py`."""
    root = next(root for root in ROOTS if path.is_relative_to(root))
    return path.relative_to(root / "dynamo").as_posix()


def wing_of(path: Path) -> str:
    """Return the wing of a source file."""
    return path.relative_to(ROOT / "src").parts[0]


def located(name: str) -> Path | None:
    """Find a file or folder by its path below `dynamo`; None: no wing has it."""
    return next((found for root in ROOTS if (found := root / "dynamo" / name).exists()), None)

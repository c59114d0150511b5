"""How the vectors of a model are made: from the files of `sentence-transformers` where the directory has them.

These are `modules.json` and `1_Pooling/config.json`; `config.json` states whether vectors may be shortened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamo.contract.requests.json_files import read_object
from dynamo.errors import InvalidArgument

MODES: Final = ("mean", "last", "cls")
_ST_MODES: Final = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How hidden states become the vector of an input."""

    mode: str = "mean"  # the mean of all tokens, the last one's, or the first one's
    normalize: bool = True
    dimensions: int = 0  # of the model's vectors
    shortens: bool = False  # trained so that the first values of a vector are a vector too (Matryoshka)
    lengths: tuple[int, ...] = ()  # to which; (): to any
    labels: tuple[str, ...] = ()  # of the classification head; (): there is none


NO_POOLING: Final = Pooling()


def read_pooling(
    directory: Path,
    size: int,
    *,
    labels: tuple[str, ...] = (),
    mode: str | None = None,
    normalize: bool | None = None,
    default_mode: str = "mean",
) -> Pooling:
    """Read how a model's vectors are made, which have `size` values.

    `mode` and `normalize` win over its files; without either: `default_mode`, and the length 1. `labels`: those of its
    classification head. Raises InvalidArgument naming the file for a module that is not supported.
    """
    found_mode, found_normalize = default_mode, True
    modules = directory / "modules.json"
    if modules.is_file():
        found_mode, found_normalize = _read_modules(directory, read_object(modules, items="modules"))
    raw = read_object(directory / "config.json")
    lengths = raw.get("matryoshka_dimensions")
    known: list[int] = []
    if isinstance(lengths, list) and all(type(each) is int and each > 0 for each in lengths):
        known = lengths
    return Pooling(
        mode or found_mode,
        found_normalize if normalize is None else normalize,
        size,
        bool(raw.get("is_matryoshka")) or bool(known),
        tuple(known),
        labels,
    )


def dimensions_within(wanted: Any, pooling: Pooling) -> int | None:
    """Return how long the vectors are to be; None: as the model makes them.

    Raises InvalidArgument for a length that the model was not trained for.
    """
    if wanted is None or wanted == pooling.dimensions:
        return None
    if not pooling.shortens:
        raise InvalidArgument(
            f"dimensions is {wanted}, but this model makes vectors of {pooling.dimensions} and was not trained to shorten them"
        )
    if (
        type(wanted) is not int
        or not 1 <= wanted <= pooling.dimensions
        or (pooling.lengths and wanted not in pooling.lengths)
    ):
        known = ", ".join(map(str, pooling.lengths)) or f"1 to {pooling.dimensions}"
        raise InvalidArgument(f"dimensions must be one of {known}, got {wanted!r}")
    return wanted


def _read_modules(directory: Path, modules: Mapping[str, Any]) -> tuple[str, bool]:
    mode, normalizes = "mean", False
    for module in modules["modules"]:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        match kind:
            case "Transformer":
                continue
            case "Normalize":
                normalizes = True
            case "Pooling":
                path = directory / str(module.get("path", "1_Pooling")) / "config.json"
                chosen = [
                    name
                    for name, value in read_object(path).items()
                    if value is True and name.startswith("pooling_mode_")
                ]
                if len(chosen) != 1 or chosen[0] not in _ST_MODES:
                    raise InvalidArgument(f"{path}: exactly one of {', '.join(_ST_MODES)} must be true, got {chosen}")
                mode = _ST_MODES[chosen[0]]
            case _:
                raise InvalidArgument(
                    f"{directory / 'modules.json'}: the module {kind or module!r} is not supported (only Transformer, Pooling "
                    "and Normalize are)"
                )
    return mode, normalizes

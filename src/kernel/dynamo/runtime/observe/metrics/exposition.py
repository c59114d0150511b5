"""The Prometheus text format: the form of a name, a label and a number, and foreign text sorted into ours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

TypedFamily = tuple[Any, ...]
"""What a typed callback returns, in a list: `(family, help, type word, ..., samples)` with samples
`(name, [(label, value)], value, ...)`. Versions of the contract put further members where the dots are."""

_INVALID: Final = re.compile(r"[^a-zA-Z0-9_:]")


@lru_cache(maxsize=1024)  # the same few names come with every series
def sanitize(name: str, *, label: bool = False) -> str:
    """Return `name` as Prometheus accepts it: other characters become `_`, a leading digit gets a `_` before it."""
    cleaned = _INVALID.sub("_", name)
    if label:
        cleaned = cleaned.replace(":", "_")
    return f"_{cleaned}" if not cleaned or cleaned[0].isdigit() else cleaned


def escape_label(value: str) -> str:
    """Return a label value as it stands between the quotes."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number_text(value: float) -> str:
    """Return a sample's value."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if value != value:
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def braces(labels: str) -> str:
    """Return a label text as it stands behind a name."""
    return f"{{{labels}}}" if labels else ""


@dataclass(slots=True)
class Block:
    """The lines of one family."""

    kind: str
    help: str
    lines: list[str] = field(default_factory=list)


def label_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Return what stands between the braces. Raises ValueError for a name that is given twice; "" gives no label."""
    clean = [(sanitize(name, label=True), value) for name, value in pairs if value != ""]
    names = [name for name, _ in clean]
    if len(set(names)) != len(names):
        raise ValueError(f"a label is given twice: {names}")
    return ",".join(f'{name}="{escape_label(str(value))}"' for name, value in clean)


def escape_help(text: str) -> str:
    """Return a help text as one line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


_SUFFIXES: Final = ("_bucket", "_sum", "_count", "_total", "_created", "_info", "_gsum", "_gcount")
_SAMPLE: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def merge_text(blocks: dict[str, Block], text: str) -> None:
    """Sort foreign exposition text into `blocks`; the first HELP and TYPE of a family win."""
    current = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        if line.startswith("#"):
            parts = line.split(None, 3)
            if len(parts) >= 3 and parts[1] in ("HELP", "TYPE"):
                current = parts[2]
                block = blocks.setdefault(current, Block("", ""))
                rest = parts[3] if len(parts) > 3 else ""
                if parts[1] == "HELP":
                    block.help = block.help or rest
                else:
                    block.kind = block.kind or rest
            continue  # other comments and OpenMetrics' "# EOF" would be wrong in the middle of the output
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name = found[0]
        belongs = name == current or (name.startswith(current) and name[len(current) :] in _SUFFIXES)
        if not current or not belongs:
            current = name
            blocks.setdefault(current, Block("", ""))
        blocks[current].lines.append(line)


def merge_typed(blocks: dict[str, Block], known: frozenset[str], family: TypedFamily) -> None:
    """Add a foreign family of values, unless text of that name is there (`known`)."""
    name, help_text, kind, samples = family[0], family[1], family[2], family[-1]
    # In values a counter is called `x` and its sample `x_total`; in text both are `x_total`.
    name = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
    if name in known:
        return
    block = blocks.setdefault(name, Block(kind, escape_help(help_text)))
    for sample in samples:
        if not sample[0].endswith("_created"):  # the text format has no place for them
            block.lines.append(f"{sample[0]}{braces(label_text(sample[1]))} {number_text(sample[2])}")


def render(blocks: dict[str, Block]) -> bytes:
    """Return the whole output, sorted by family name."""
    out: list[str] = []
    for name in sorted(blocks):
        block = blocks[name]
        if block.help:
            out.append(f"# HELP {name} {block.help}")
        if block.kind:
            out.append(f"# TYPE {name} {block.kind}")
        out += block.lines
    out.append("")
    return "\n".join(out).encode("utf-8", "replace")

"""Variables that belong to others and that this package reads, too: they define what each means, and this package defines its use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from dynamo.settings.readers import folder, integer, switch, text
from dynamo.settings.table import Setting, declared

HUB_HOME: Final = declared(
    "HF_HOME", folder,
    "Where the hub's client keeps its files; a model in the cache there is used without a question",
    unset=Path("~/.cache/huggingface"), shown="`~/.cache/huggingface`",
)  # fmt: skip
HUB_CACHE: Final = declared("HF_HUB_CACHE", folder, "The cache itself", shown="`hub` below `HF_HOME`")
HUB_OFFLINE: Final = declared("HF_HUB_OFFLINE", switch, "Never ask the model hub", unset=False)
MULTIPROC_DIRECTORY: Final = declared(
    "PROMETHEUS_MULTIPROC_DIR", folder,
    "Where the `prometheus_client` of an engine with several processes keeps its values",
)  # fmt: skip
NO_CREATED_SERIES: Final = declared(
    "PROMETHEUS_DISABLE_CREATED_SERIES", text,
    "Set to 1 for vLLM where it is unset: without it each of its counters comes twice",
)  # fmt: skip
VISIBLE_CUDA: Final = declared(
    "CUDA_VISIBLE_DEVICES", text, "Empty, `-1`, `none` or `void`: the instance record says `cpu`, else `cuda`"
)
VISIBLE_NVIDIA: Final = declared("NVIDIA_VISIBLE_DEVICES", text, "`none` or `void`: the same")
OPENMP_THREADS: Final = declared(
    "OMP_NUM_THREADS", integer(1), "Threads of vLLM and of transformers on a processor", shown="all cores but one",
)  # fmt: skip
NO_COLOR: Final = declared("NO_COLOR", text, "Set to anything: no colours")

FOREIGN: Final[tuple[Setting, ...]] = (
    HUB_HOME, HUB_CACHE, HUB_OFFLINE, MULTIPROC_DIRECTORY, NO_CREATED_SERIES, VISIBLE_CUDA, VISIBLE_NVIDIA,
    OPENMP_THREADS,
)  # fmt: skip


def has_colour(stream: TextIO | None, env: Mapping[str, str]) -> bool:
    """Return whether text for this stream may be coloured: it is a terminal, and `NO_COLOR` is not set."""
    return stream is not None and stream.isatty() and NO_COLOR.value(env) is None

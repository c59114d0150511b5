"""The settings of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.settings.readers import (
    SettingReader,
    integer,
    mebibytes,
    seconds,
    switch,
)
from dynamo.settings.table import setting

MIB: Final = 1024 * 1024


_REQUESTS: Final = "requests"


@dataclass(frozen=True, kw_only=True)
class BatchesSettings:
    """Where files and batches lie, and what they may cost; sizes in bytes."""

    # fmt: off
    files_dir: Path | None = setting(None, "DYN_FILES_DIR", SettingReader(Path, metavar="DIR"),
        "Serve [files and batches](batches.md), and keep them in this directory; several frontends of one machine may share "
        "it. Unset: they are switched off", flag="--files-dir", group=_REQUESTS)
    files_dir_force: bool = setting(False, "DYN_FILES_DIR_FORCE", switch,
        "Take a directory on a network file system, too, which one machine alone uses")
    file_limit_bytes: int = setting(512 * MIB, "DYN_FILES_MAX_MB", mebibytes, "Size of one file; more is a 413")
    batch_file_limit_bytes: int = setting(200 * MIB, "DYN_FILES_MAX_BATCH_MB", mebibytes,
        "Size of the input of a batch; more is a 413")
    files_total_bytes: int = setting(100 * 1024 * MIB, "DYN_FILES_TOTAL_MB", mebibytes,
        "Size of all files of a project, those on their way in included; more is a 413")
    files_total_count: int = setting(20_000, "DYN_FILES_TOTAL_COUNT", integer(1),
        "How many files a project may have, empty ones included; more is a 413")
    batch_concurrency: int | None = setting(None, "DYN_BATCH_CONCURRENCY", integer(1),
        "Lines of batches that run at once. Unset: a quarter of `--max-requests-in-flight`",
        flag="--batch-concurrency", group=_REQUESTS)
    batch_model_wait_seconds: float = setting(30.0, "DYN_BATCH_MODEL_WAIT_SECS", seconds(),
        "How long after its start a frontend lets lines wait for a model that it has not found yet; later they fail")
    # fmt: on

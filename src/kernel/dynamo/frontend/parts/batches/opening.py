"""The files and batches of a frontend, from its settings."""

from __future__ import annotations

from dynamo.frontend.base.access import CallerLookup
from dynamo.frontend.parts.batches.service import BatchService, BatchSettings
from dynamo.frontend.parts.batches.stored_files import FileLimits
from dynamo.frontend.pipeline.inference import Pipeline
from dynamo.frontend.settings import FrontendSettings

__all__ = ["open_batches"]


def open_batches(settings: FrontendSettings, pipeline: Pipeline, keys: CallerLookup | None) -> BatchService | None:
    """Open the directory of files; None where there is none. Raises InvalidArgument when it cannot be used."""
    if settings.files_dir is None:
        return None
    limits = FileLimits(settings.file_limit_bytes, settings.batch_file_limit_bytes, settings.files_total_bytes)
    chosen = BatchSettings(
        settings.files_dir.expanduser(),
        limits,
        settings.files_dir_force,
        settings.batch_concurrency,
        settings.batch_model_wait_seconds,
    )
    return BatchService(chosen, pipeline, keys)

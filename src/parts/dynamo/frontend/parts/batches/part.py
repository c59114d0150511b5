"""Files and batches as a part: a directory that keeps them, the runner of batches, and their routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dynamo.frontend.base.access import Access, CallerLookup
from dynamo.frontend.base.settings.batches import BatchesSettings
from dynamo.frontend.http.routes import GuardedRoute
from dynamo.frontend.parts.batches.batch_routes import BatchesRoute, BatchRoute
from dynamo.frontend.parts.batches.file_routes import FileContentRoute, FileRoute, FilesRoute
from dynamo.frontend.parts.batches.metrics import FAMILIES
from dynamo.frontend.parts.batches.service import BatchService, BatchSettings
from dynamo.frontend.parts.batches.stored_files import FileLimits
from dynamo.frontend.parts.part import Kernel, Part
from dynamo.frontend.pipeline.inference import Call
from dynamo.frontend.pipeline.outcome import RequestListener
from dynamo.protocol.batches.schema import BATCHES_API
from dynamo.protocol.openai.schema import ApiDescription


class Batches(Part):
    """The service, and its routes."""

    name: ClassVar[str] = "batches"
    families = FAMILIES

    def __init__(self, service: BatchService, kernel: Kernel) -> None:
        self.service, self._kernel = service, kernel

    def connect(self, calls: Mapping[str, Call]) -> None:
        self.service.serve(calls)

    def listeners(self) -> Sequence[RequestListener]:
        return (self.service,)

    def routes(self) -> Sequence[GuardedRoute]:
        service = self.service
        files, one, batch = FilesRoute(service.files), FileRoute(service.files), BatchRoute(service)
        batches = BatchesRoute(service, self._kernel.budget)
        return (
            GuardedRoute("/v1/files", files, "GET", "POST", access=Access.FILES, takes_forms=True),
            GuardedRoute("/v1/files/{file_id}", one, "GET", "DELETE", access=Access.FILES),
            GuardedRoute("/v1/files/{file_id}/content", FileContentRoute(service.files), "GET", access=Access.FILES),
            GuardedRoute("/v1/batches", batches, "GET", "POST", access=Access.BATCHES),
            GuardedRoute("/v1/batches/{batch_id}", batch, "GET", access=Access.BATCHES),
            GuardedRoute("/v1/batches/{batch_id}/cancel", batch, "POST", access=Access.BATCHES),
        )

    def described(self) -> Sequence[ApiDescription]:
        return (BATCHES_API,)

    def troubles(self) -> Sequence[str]:
        return list(self.service.troubles())

    async def start(self) -> None:
        self.service.start()

    async def aclose(self) -> None:
        await self.service.aclose()


def open_batches(settings: BatchesSettings, kernel: Kernel, keys: CallerLookup | None) -> BatchService:
    """Open the directory of files. Raises InvalidArgument when it cannot be used."""
    assert settings.files_dir is not None, "files are switched off"
    limits = FileLimits(
        settings.file_limit_bytes,
        settings.batch_file_limit_bytes,
        settings.files_total_bytes,
        settings.files_total_count,
    )
    chosen = BatchSettings(
        settings.files_dir.expanduser(),
        limits,
        settings.files_dir_force,
        settings.batch_concurrency,
        settings.batch_model_wait_seconds,
    )
    return BatchService(chosen, kernel.pipeline, keys, kernel.shares)

"""The files of the access log and the audit log of a frontend."""

from __future__ import annotations

from dynamo.frontend.parts.keys.line_file import LineFile
from dynamo.frontend.settings import FrontendSettings

__all__ = ["RequestLogs"]


class RequestLogs:
    """Both files; None where a log is off."""

    def __init__(self, settings: FrontendSettings) -> None:
        """Raises InvalidArgument for a file that cannot be written."""
        self.access = None if settings.access_log is None else LineFile(settings.access_log)
        self.audit = None if settings.audit_log is None else LineFile(settings.audit_log)

    async def aclose(self) -> None:
        """Write the rest."""
        for file in (self.access, self.audit):
            if file is not None:
                await file.aclose()

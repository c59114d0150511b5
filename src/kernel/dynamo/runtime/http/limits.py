"""How a listener declines what is beyond its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from dynamo.runtime.base.http_limits import Rejection

LINGER_SECONDS: Final = 2.0
"""After a refusal the client may still be sending. Closing at once would make the kernel answer that with a reset, which
throws away the refusal before it is read; so what comes is read and dropped, until nothing has come for this long."""

LINGER_LIMIT_SECONDS: Final = 30.0  # for a client that never stops sending

SPARE_CONNECTIONS: Final = 64  # beyond the limit: as many clients at once get a refusal; the others are just closed


class RenderRejection(Protocol):
    """Writes a rejection in the form of the application's answers."""

    def __call__(
        self, rejection: Rejection, request_headers: Sequence[tuple[bytes, bytes]]
    ) -> tuple[Mapping[bytes, bytes], bytes]:
        """Return headers (without content-length and connection) and body."""

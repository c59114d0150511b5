"""Which requests may come from a page of another site, and what the listeners of admin routes do with them."""

from __future__ import annotations

from dynamo.runtime.http.cross_site import cross_site_reason
from support.cases import each_case


@each_case(
    ("listens_at", "host", "origin", "word"),
    [
        ("127.0.0.1", "127.0.0.1:9000", None, None),
        ("127.0.0.1", "localhost:9000", None, None),
        ("127.0.0.1", "[::1]:9000", None, None),
        ("::1", "[::1]", None, None),
        ("127.0.0.1", "LOCALHOST", None, None),
        ("127.0.0.1", None, None, None),  # HTTP/1.0
        ("127.0.0.1", "127.0.0.1:9000", "http://127.0.0.1:9000", None),
        ("127.0.0.1", "127.0.0.1:9000", "http://localhost:9000", "Origin"),
        ("127.0.0.1", "127.0.0.1:9000", "http://127.0.0.1:3000", "Origin"),
        ("127.0.0.1", "127.0.0.1:9000", "https://evil.example", "Origin"),
        ("127.0.0.1", "127.0.0.1:9000", "null", "Origin"),  # a sandboxed frame, a file
        ("127.0.0.1", "evil.example:9000", None, "Host"),  # a name that was made to resolve to 127.0.0.1
        ("127.0.0.1", "evil.example:9000", "http://evil.example:9000", "Host"),
        ("localhost", "evil.example", None, "Host"),
        ("127.0.0.1", "localhost.evil.example", None, "Host"),
        ("127.0.0.1", "127.0.0.1.evil.example", None, "Host"),
        ("0.0.0.0", "worker-3.cluster:9000", None, None),
        ("0.0.0.0", "worker-3.cluster:9000", "https://evil.example", "Origin"),
    ],
)
def test_a_request_of_another_sites_page_is_recognised(
    listens_at: str, host: str | None, origin: str | None, word: str | None
) -> None:
    headers = [(b"accept", b"*/*")]
    headers += [] if host is None else [(b"host", host.encode())]
    headers += [] if origin is None else [(b"origin", origin.encode())]
    reason = cross_site_reason(headers, listens_at)
    assert reason is None if word is None else word in str(reason)

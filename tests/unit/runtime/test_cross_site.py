"""Which requests may come from a page of another site, and what the listeners of admin routes do with them."""

from __future__ import annotations

import pytest

from dynamo.runtime.base.settings import SystemSettings
from dynamo.runtime.http.cross_site import SameSite, is_form
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
        ("127.0.0.1", "api.localhost:9000", None, None),
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
    reason = SameSite(listens_at).reason(headers)
    assert reason is None if word is None else word in str(reason)


@each_case(
    ("listens_at", "hosts", "host", "origin", "word"),
    [
        ("127.0.0.1", ("api.example",), "api.example:443", None, None),
        ("127.0.0.1", ("api.example",), "API.example", "https://api.example", None),
        (
            "127.0.0.1",
            ("api.example",),
            "127.0.0.1:8000",
            "https://api.example",
            None,
        ),  # a proxy that sends its own Host
        ("127.0.0.1", ("api.example",), "localhost", None, None),
        ("127.0.0.1", ("api.example",), "evil.example", None, "Host"),
        ("127.0.0.1", ("api.example",), "api.example", "https://evil.example", "Origin"),
        ("127.0.0.1", ("*",), "evil.example", None, None),
        ("127.0.0.1", ("*",), "localhost", "https://evil.example", "Origin"),
        ("0.0.0.0", ("api.example",), "evil.example", "http://evil.example", "Host"),
        ("127.0.0.1", ("api.example",), "localhost", "null", "Origin"),
    ],
)
def test_hosts_that_are_named_are_the_only_ones(
    listens_at: str, hosts: tuple[str, ...], host: str, origin: str | None, word: str | None
) -> None:
    headers = [(b"host", host.encode()), *([] if origin is None else [(b"origin", origin.encode())])]
    reason = SameSite(listens_at, hosts).reason(headers)
    assert reason is None if word is None else word in str(reason)


@each_case(
    ("origins", "origin", "is_permitted"),
    [
        (("https://app.example",), "https://app.example", True),
        (("https://app.example",), "https://evil.example", False),
        (("*",), "https://evil.example", True),
        (("*",), "null", True),
        ((), "https://app.example", False),
    ],
)
def test_pages_of_origins_that_are_named_may_call(origins: tuple[str, ...], origin: str, is_permitted: bool) -> None:
    rule = SameSite("127.0.0.1", (), origins)
    assert (rule.reason([(b"host", b"localhost"), (b"origin", origin.encode())]) is None) is is_permitted
    assert "Host" in str(rule.reason([(b"host", b"evil.example"), (b"origin", origin.encode())])) or not is_permitted


@each_case(
    ("headers", "found"),
    [
        ({}, False),
        ({"content-type": "application/json"}, False),
        ({"content-type": "text/plain;charset=UTF-8"}, True),
        ({"content-type": "application/x-www-form-urlencoded"}, True),
        ({"content-type": "Multipart/Form-Data; boundary=x"}, True),
        (
            {"content-type": "application/x-www-form-urlencoded", "authorization": "Bearer x"},
            False,
        ),  # curl -d with a key
    ],
)
def test_what_the_form_of_any_page_could_send_is_a_form(headers: dict[str, str], found: bool) -> None:
    assert is_form([(name.encode(), value.encode()) for name, value in headers.items()]) is found


@pytest.mark.parametrize("given", ["http://api.example", "api.example:443", "a/b", "a b"])
def test_the_name_of_a_host_has_neither_scheme_nor_port(given: str, caplog: pytest.LogCaptureFixture) -> None:
    assert SystemSettings.from_env({"DYN_ALLOWED_HOSTS": given}).allowed_hosts == ()
    assert "DYN_ALLOWED_HOSTS" in caplog.text
    assert "without scheme and port" in caplog.text


def test_names_of_hosts_are_read_in_lower_case() -> None:
    read = SystemSettings.from_env({"DYN_ALLOWED_HOSTS": "Api.Example, b"}).allowed_hosts
    assert read == ("api.example", "b")

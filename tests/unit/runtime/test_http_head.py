"""The head of an HTTP answer: how the body behind it is framed, and whether the connection is kept."""

from __future__ import annotations

import pytest

from dynamo.runtime.http.head import CHUNKED, TO_THE_END, write_head
from support.cases import each_case

LENGTH = (b"content-length", b"7")
CLOSE = (b"Connection", b"Close")


def framing(
    status: int, *headers: tuple[bytes, bytes], method: str = "POST", version: str = "1.1"
) -> tuple[object, bool]:
    _, left, keep_alive = write_head(status, headers, method=method, http_version=version, keep_alive=True)
    return left, keep_alive


@each_case(
    ("found", "expected"),
    [
        pytest.param(framing(200, LENGTH), (7, True), id="an announced length"),
        pytest.param(framing(200), (CHUNKED, True), id="no length"),
        pytest.param(framing(200, version="1.0"), (TO_THE_END, False), id="no length for a client of HTTP/1.0"),
        pytest.param(framing(200, LENGTH, method="HEAD"), (7, True), id="an answer to HEAD"),
        pytest.param(framing(200, method="HEAD"), (0, True), id="an answer to HEAD without a length"),
        pytest.param(framing(204), (0, True), id="no content"),
        pytest.param(framing(304), (0, True), id="not modified"),
        pytest.param(framing(103), (0, True), id="an early hint"),
        pytest.param(framing(200, LENGTH, CLOSE), (7, False), id="the application closes"),
    ],
)
def test_the_framing_follows_the_status_the_request_and_the_headers(found: object, expected: object) -> None:
    assert found == expected


def test_the_head_says_how_the_body_is_framed_and_that_the_connection_closes() -> None:
    head, _, _ = write_head(200, [(b"X-One", b"1")], method="POST", http_version="1.1", keep_alive=False)
    assert head == b"HTTP/1.1 200 OK\r\nx-one: 1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"


def test_the_application_does_not_choose_the_framing() -> None:
    head, left, _ = write_head(
        200, [(b"Transfer-Encoding", b"gzip"), LENGTH], method="POST", http_version="1.1", keep_alive=True
    )
    assert (head, left) == (b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n", 7)


@pytest.mark.parametrize("header", [(b"x y", b"1"), (b"x:", b"1"), (b"x", b"1\r\ny: 2"), (b"x", b"\0"), (b"", b"\n")])
def test_a_header_that_could_end_the_head_is_refused(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(RuntimeError, match="not valid"):
        write_head(200, [header], method="POST", http_version="1.1", keep_alive=True)

"""What the commands of a terminal say when a server does not take a request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from dynamo.cli.api_client import ApiClient, ServerError
from support.patience import PATIENCE_SECONDS
from support.ports import held_port

TOO_LARGE = b'{"error": {"message": "the file is too large"}}'


@contextmanager
def server(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server of one connection; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE_SECONDS)


def send_much(url: str) -> ServerError:
    client = ApiClient(url, None)
    body = (b"x" * 65_536 for _ in range(1_000))
    with closing(client.connect()) as connection, pytest.raises(ServerError) as raised:
        client.request(connection, "POST", "/v1/files", raw=body, headers={"Content-Length": str(65_536_000)})
    return raised.value


def test_a_server_that_closes_while_a_body_is_sent_is_not_taken_for_one_that_is_not_there() -> None:
    with server(lambda connection: connection.recv(1000)) as url:
        error = send_much(url)
    assert "closed the connection while the request was being sent" in str(error)
    assert "is it running" not in str(error)
    assert error.status is None


def test_an_answer_that_comes_before_the_body_was_sent_is_shown() -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        head = f"HTTP/1.1 413 Too large\r\nContent-Length: {len(TOO_LARGE)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + TOO_LARGE)

    with server(refuse) as url:
        error = send_much(url)
    assert str(error) == "413: the file is too large"
    assert error.status == 413


def test_a_server_that_is_not_there_is_asked_for() -> None:
    with held_port() as port, pytest.raises(ServerError, match="is it running"):
        ApiClient(f"http://127.0.0.1:{port}", None).call("GET", "/v1/batches")


def test_a_server_that_closes_before_it_answers_is_named() -> None:
    with server(lambda connection: connection.recv(1000)) as url, pytest.raises(ServerError) as raised:
        ApiClient(url, None).call("GET", "/v1/batches")
    assert "no answer from" in str(raised.value)
    assert "is it running" not in str(raised.value)

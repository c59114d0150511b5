"""`dynamo serve` at a Unix socket alone, below a prefix: curl, a client over HTTP and OpenAI's own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.patience import PATIENCE_SECONDS
from support.serve_command import left_behind, serve_command

openai = pytest.importorskip("openai")
# The HTTP library of the installed version: httpx, or httpx2.
httpx: Any = import_module(openai.DefaultHttpxClient.__base__.__module__.partition(".")[0])

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_there(path: Path) -> bool:
    return path.exists()


@pytest.mark.parametrize("more", [(), ("--frontend-workers", "2"), ("--in-process",)])
def test_a_socket_without_a_port_serves_every_client(tmp_path: Path, more: tuple[str, ...]) -> None:
    path = tmp_path / "api.sock"
    where = ("--http-port", "off", "--uds", str(path), "--root-path", "/llm")
    with serve_command(tmp_path, "my-model", "--engine", "guide_engine:GuideEngine", *where, *more) as command:
        command.wait_ready()
        assert f"unix:{path}" in command.out
        assert mode_of(path) == 0o600
        printed = command.printed_curl()
        assert f"--unix-socket {path} http://localhost/llm/v1/chat/completions" in printed
        said = subprocess.run(
            ["bash", "-c", f"{printed} -sS"], capture_output=True, check=True, timeout=PATIENCE_SECONDS
        )
        assert b"hello from the guide" in said.stdout
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost/llm") as client:
            document = client.get("/openapi.json").json()
            assert document["servers"] == [{"url": "/llm"}]
            assert "dynamo_frontend_requests_total" in client.get("/metrics").text
            pages = client.get("/", headers={"accept": "text/html"}).text
            assert 'href="/llm/docs"' in pages
            assert 'href="/llm/inspect/"' in pages
            assert 'src="/llm/docs/' in client.get("/docs").text
            assert client.get("/inspect/").status_code == 200
            if not more:
                os.kill(command.pid_of("frontend"), signal.SIGKILL)  # a client waits for the next one
            with openai.OpenAI(base_url="http://localhost/llm/v1", api_key="none", http_client=client) as official:
                command.wait_for(
                    lambda: [model.id for model in official.models.list().data] == ["my-model"], "the model"
                )
                stream = official.chat.completions.create(model="my-model", messages=MESSAGES, stream=True)
                assert "".join(event.choices[0].delta.content or "" for event in stream) == "hello from the guide"
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0, command.err
    assert not is_there(path)
    assert left_behind(tmp_path) == []


def test_a_socket_that_is_taken_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with serve_command(tmp_path, "--port", "0", "--uds", str(path)) as command:
        assert command.wait_ended() == 2
        assert command.err == f"dynamo serve: error: --uds {path}: there is a file that is not a socket\n"
    assert path.read_text() == "mine"

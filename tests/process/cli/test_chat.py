"""`dynamo chat` as a person uses it: one question, a conversation, and what goes wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.serve_command import ServeCommand, serve_command

pytestmark = pytest.mark.timeout(180)

APP = """
async def parrot(messages):
    if messages[-1]["content"] == "fail":
        raise RuntimeError("no more words")
    yield f"{len(messages)}: {messages[-1]['content']}"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    directory = tmp_path_factory.mktemp("chat")
    (directory / "app.py").write_text(APP)
    with serve_command(directory, "--engine", "app.py:parrot", "--in-process", "--port", "0") as command:
        command.patience = 120.0
        command.wait_ready()
        yield command


def chat(*argv: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "dynamo.cli.main", "chat", *argv]
    return subprocess.run(program, input=typed, capture_output=True, text=True, timeout=60, check=False)


def test_a_message_is_answered_and_that_is_all(served: ServeCommand) -> None:
    done = chat("--url", f"{served.url}/v1", "hello", "there")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1: hello there\n", "")


def test_a_message_is_read_from_standard_input(served: ServeCommand) -> None:
    assert chat("--url", served.url, "--system", "be kind", "-", typed="from a pipe").stdout == "2: from a pipe\n"


def test_a_conversation_is_kept_until_it_is_reset(served: ServeCommand) -> None:
    done = chat("--url", served.url, typed="one\ntwo\n/rest\n/reset\nthree\n/quit\nnever\n")
    assert done.returncode == 0
    assert [line.lstrip("> ") for line in done.stdout.split("\n") if line.strip("> ")] == [
        "1: one",
        "3: two",
        "there is no command /rest; did you mean /reset?; /help lists them",
        "1: three",
    ]


def test_an_answer_that_fails_ends_one_question_with_status_1_and_not_the_conversation(served: ServeCommand) -> None:
    once = chat("--url", served.url, "fail")
    assert (once.returncode, once.stdout) == (1, "")
    assert "Internal server error" in once.stderr
    assert once.stderr.startswith("dynamo chat: 500: ")
    talk = chat("--url", served.url, typed="fail\nagain\n")
    assert (talk.returncode, "1: again" in talk.stdout) == (0, True)


def test_a_model_that_is_not_served_is_an_error_of_use(served: ServeCommand) -> None:
    done = chat("--url", served.url, "--model", "parot", "hi")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--model 'parot' is not served; did you mean parrot?; there is parrot" in done.stderr


def test_a_server_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    done = chat("--url", "127.0.0.1:1", "hi")
    assert done.returncode == 1
    assert "no answer from http://127.0.0.1:1" in done.stderr
    assert "`dynamo serve` starts one" in done.stderr
    assert chat("--url", "ftp://x", "hi").returncode == 2

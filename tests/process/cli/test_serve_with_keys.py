"""Keys as operators and clients have them: the commands, a group of frontends, the official clients, all that is printed."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from support.serve_command import serve_command

ENGINE = ("--engine", "guide_engine:GuideEngine", "--http-host", "127.0.0.1", "--http-port", "0")


def make_key(path: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "dynamo.cli.main", "keys", "create", "--file", str(path), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def status_of(client: openai.OpenAI) -> int:
    try:
        client.chat.completions.create(model="my-model", messages=[{"role": "user", "content": "hi"}], max_tokens=30)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.parametrize("processes", [1, 2])
def test_official_clients_with_keys_and_limits_that_all_processes_share(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "keys.toml"
    free, daily = make_key(path, "--name", "free"), make_key(path, "--rpd", "30")
    wrong = "sk-this-key-is-known-to-nobody"
    more = ("--frontend-workers", str(processes)) if processes > 1 else ()
    files = {"DYN_ACCESS_LOG": str(tmp_path / "access"), "DYN_USAGE_DB": str(tmp_path / "usage")}
    with serve_command(tmp_path, "my-model", *ENGINE, *more, "--keys", str(path), DYN_LOG="debug", **files) as command:
        command.wait_ready()
        base = f"{command.url}/v1"

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=base, api_key=key, max_retries=0)

        with client(free) as known, client(wrong) as unknown:
            assert [model.id for model in known.models.list()] == ["my-model"]
            assert status_of(known) == 200
            with pytest.raises(openai.AuthenticationError) as refused:
                unknown.models.list()
            assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
            assert refused.value.request_id
        with anthropic.Anthropic(base_url=command.url, api_key=free, max_retries=0) as messages:
            said = messages.messages.create(
                model="my-model", max_tokens=30, messages=[{"role": "user", "content": "hi"}]
            )
            block: Any = said.content[0]
            assert block.text == "hello from the guide"
            assert said._request_id
        with (
            anthropic.Anthropic(base_url=command.url, api_key=wrong, max_retries=0) as messages,
            pytest.raises(anthropic.AuthenticationError),
        ):
            messages.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "hi"}])

        def burst(_: int) -> list[int]:
            with client(daily) as one:  # a connection of its own: the parent deals them out
                return [status_of(one) for _ in range(5)]

        with ThreadPoolExecutor(8) as pool:
            counts = Counter(status for statuses in pool.map(burst, range(8)) for status in statuses)
        assert counts == {200: 5, 429: 35}  # a sixth of the day's 30 at once, and the next one comes in 48 minutes
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_ended() == 0
        printed = command.out + command.err + (tmp_path / "access").read_text()
        printed += "".join([file.read_bytes().decode("latin-1") for file in tmp_path.glob("usage*")])
        asked = [json.loads(line) for line in (tmp_path / "access").read_text().splitlines()]
        statuses = Counter(line["status"] for line in asked if line["route"] == "/v1/chat/completions")
        assert statuses == {200: 6, 429: 35}
        assert sum(line.get("output", 0) for line in asked) == 7 * len("hello from the guide")
        with closing(sqlite3.connect(tmp_path / "usage")) as database:
            totals = "SELECT SUM(requests), SUM(errors), SUM(output) FROM usage WHERE endpoint = 'chat_completions'"
            counted = database.execute(f"{totals} AND model != ''").fetchone()
            turned_away = database.execute(f"{totals} AND model = ''").fetchone()
        answered, named_errors, output = counted
        assert (answered - named_errors, output) == (6, 6 * len("hello from the guide"))
        # Most are turned away before their body is read, so that their model is not known. One whose body was read while
        # another took the last of the rate is refused after it, under its model's name.
        assert (turned_away[0] + named_errors, turned_away[1] + named_errors, turned_away[2]) == (35, 35, 0)
        assert turned_away[0] > named_errors
        for secret in (free, daily, wrong):
            assert secret not in printed
            assert secret.rpartition(".")[2] not in printed

"""`dynamo batch run` against real servers that do not take the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.access import key, secret_of, write_keys
from support.batch_client import chat_line
from support.processes import Cluster, Frontend

CASES = {
    "no directory": ([], {}, "a", 501, "--files-dir"),
    "a wrong key": (["--keys", "keys.toml"], {}, "nobody", 401, "Incorrect API key"),
    "a key without batches": (["--keys", "keys.toml"], {}, "chats", 403, "batches"),
    "a file that is too large": (["--keys", "keys.toml"], {"DYN_FILES_MAX_BATCH_MB": "1"}, "a", 413, "at most 1 MB"),
}


def run_batch(frontend: Frontend, source: Path, id: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamo.cli.main", "batch", "run", str(source), "-o", f"{source}.out"]
    command += ["--url", frontend.url, "--api-key", secret_of(id), "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_does_not_take_the_file_is_understood(tmp_path: Path, case: str) -> None:
    flags, env, id, status, words = CASES[case]
    write_keys(tmp_path / "keys.toml", key("a"), key("chats", routes=["inference"]))
    line = json.dumps(chat_line("one", "x" * 900)).encode() + b"\n"
    source = tmp_path / "in.jsonl"
    source.write_bytes(line * (20_000 if status == 413 else 1))
    flags = [str(tmp_path / flag) if flag.endswith(".toml") else flag for flag in flags]
    if status != 501:
        flags += ["--files-dir", str(tmp_path / "files")]
    with Cluster(tmp_path) as cluster:
        frontend = cluster.frontend("frontend", *flags, **env)
        frontend.wait_ready()
        ended = run_batch(frontend, source, id)
        log = frontend.log
    assert ended.returncode == 1
    assert f"{status}: " in ended.stderr
    assert words in ended.stderr
    assert "running" not in ended.stderr
    assert "Traceback" not in ended.stderr + log
    assert not Path(f"{source}.out").exists()

"""Batches with real processes: the official client, kill -9 anywhere, a full disk, files that are too large."""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dynamo.frontend.parts.batches.directory import BatchDirectory
from support.batch_client import BOUNDARY, CHAT, FINAL, FORM_HEADERS, chat_line, jsonl
from support.patience import PATIENCE_SECONDS
from support.processes import Cluster, Frontend, Worker, wait

MODEL = "batched"
STEPS = ("checked", "output", "error", "index", "work")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("batches"), DYN_BATCH_MODEL_WAIT_SECS="0") as found:
        yield found


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Worker:
    return cluster.sample("worker", MODEL)


def client(frontend: Frontend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def begin(api: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    file = api.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    made = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return made.id


def ended(api: openai.OpenAI, id: str) -> Any:
    last: dict[str, Any] = {}

    def look() -> bool:
        last["batch"] = api.batches.retrieve(id)
        return last["batch"].status in FINAL

    wait(look, lambda: f"the end of {last}")
    return last["batch"]


def results(api: openai.OpenAI, batch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        for line in [] if file_id is None else api.files.content(file_id).text.splitlines():
            result = json.loads(line)
            assert result["custom_id"] not in found
            found[result["custom_id"]] = result
    return found


def stored(directory: Path) -> set[str]:
    return {id for id, _ in BatchDirectory(directory).blobs()}


def lines_of(count: int, *, wrong_each: int = 10) -> list[dict[str, Any]]:
    lines = [chat_line(f"line-{number}", f"question {number}", model=MODEL) for number in range(count)]
    for line in lines[::wrong_each]:
        line["body"]["temperature"] = 99
    return lines


def test_the_official_client_does_all_of_it(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    frontend = cluster.frontend("client", f"--files-dir={tmp_path / 'files'}")
    cluster.wait_ready(frontend, worker)
    with client(frontend) as api:
        lines = [chat_line("a", model=MODEL), chat_line("b", model=MODEL)]
        path = tmp_path / "questions.jsonl"
        path.write_bytes(jsonl(lines))
        file = api.files.create(file=path, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
        assert (file.filename, file.bytes, file.purpose, file.status) == (
            "questions.jsonl", path.stat().st_size, "batch", "processed",
        )  # fmt: skip
        assert file.expires_at == file.created_at + 3600
        assert api.files.retrieve(file.id) == file
        assert api.files.content(file.id).read() == path.read_bytes()
        assert [one.id for one in api.files.list(purpose="batch", limit=1, order="asc")] == [file.id]

        batch = api.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"for": "a test"},
            output_expires_after={"anchor": "created_at", "seconds": 7200},
        )
        batch = ended(api, batch.id)
        assert (batch.status, batch.metadata, batch.model) == ("completed", {"for": "a test"}, MODEL)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (2, 2)
        assert batch.usage is not None
        assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
        output = api.files.retrieve(batch.output_file_id or "")
        assert (output.purpose, (output.expires_at or 0) - output.created_at) == ("batch_output", 7200)
        assert set(results(api, batch)) == {"a", "b"}
        assert [one.id for one in api.batches.list(limit=1)] == [batch.id]
        with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
            api.batches.cancel(batch.id)
        assert api.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match=f"No such File object: {file.id}"):
            api.files.retrieve(file.id)
        with pytest.raises(openai.NotFoundError):
            api.batches.retrieve("batch_none")


def grown(api: openai.OpenAI, id: str, before: int, more: int) -> int:
    """Wait until so many more lines are done, or all; return how many are. The counts must never go down."""
    counts = [before]

    def look() -> bool:
        batch = api.batches.retrieve(id)
        assert batch.request_counts is not None
        counts.append(batch.request_counts.completed + batch.request_counts.failed)
        assert counts[-1] >= counts[-2], "the counts went down"
        return counts[-1] >= before + more or batch.status in FINAL

    wait(look, lambda: f"{before + more} lines")
    return counts[-1]


def test_a_thousand_lines_survive_ten_kills(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    chance = random.Random(7)
    directory = tmp_path / "files"
    id, highest = "", 0
    for start in range(11):
        frontend = cluster.frontend(
            f"killed-{start}", f"--files-dir={directory}", "--batch-concurrency=4", DYN_HTTP_MAX_REQUESTS_IN_FLIGHT="64"
        )
        cluster.wait_ready(frontend, worker)
        with client(frontend) as api:
            if not id:
                id = begin(api, lines_of(1000))
            if start == 10:
                batch = ended(api, id)
                found = results(api, batch)
                break
            highest = grown(api, id, highest, chance.randrange(1, 80))
        time.sleep(chance.random() * 0.05)  # nothing is waited for: the kill shall come anywhere
        frontend.kill()
        frontend.exit_code()
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (900, 100)
    assert set(found) == {f"line-{number}" for number in range(1000)}
    wait(lambda: BatchDirectory(directory).working() == [], lambda: "the working directory to go")
    assert stored(directory) == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
    assert list(BatchDirectory(directory).uploads().iterdir()) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_between_two_last_steps(cluster: Cluster, worker: Worker, tmp_path: Path, step: str) -> None:
    directory = tmp_path / "files"
    program = [str(Path(__file__).parent.parent.parent / "support" / "killed_frontend.py")]
    frontend = cluster.frontend(f"dies-at-{step}", f"--files-dir={directory}", within=program, KILLED_AT=step)
    cluster.wait_ready(frontend, worker)
    with client(frontend) as api:
        id = begin(api, lines_of(20))
        wait(lambda: frontend.has_ended, lambda: f"the death at {step}")
    frontend = cluster.frontend(f"after-{step}", f"--files-dir={directory}")
    cluster.wait_ready(frontend, worker)
    with client(frontend) as api:
        batch = ended(api, id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (18, 2)
        assert len(results(api, batch)) == 20
    wait(lambda: BatchDirectory(directory).working() == [], lambda: "the working directory to go")
    assert stored(directory) == {batch.input_file_id, batch.output_file_id, batch.error_file_id}


def test_the_processes_of_a_group_share_one_directory(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    frontend = cluster.frontend("group", "--workers=2", f"--files-dir={tmp_path / 'files'}")
    cluster.wait_ready(frontend, worker)
    ids = []
    for _ in range(6):
        with client(frontend) as api:  # a connection of its own, which either process may take
            ids.append(begin(api, lines_of(5)))
    for id in ids:
        with client(frontend) as api:
            assert len(results(api, ended(api, id))) == 5
    assert frontend.log.count("this process runs the batches of") == 1


def test_a_file_that_the_disk_does_not_take(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    limit = 120_000  # bytes of one file of this process: the results grow beyond it, the index does not
    program = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY)); "
        "sys.argv = sys.argv[2:]; runpy.run_module('dynamo.frontend', run_name='__main__')"
    )
    directory = tmp_path / "files"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    frontend = cluster.frontend("full", f"--files-dir={directory}", within=["-c", program])
    cluster.wait_ready(frontend, worker)
    with client(frontend) as api:
        with pytest.raises(openai.APIStatusError) as caught:
            api.files.create(file=("in.jsonl", b"x" * (limit + 1)), purpose="user_data")
        assert caught.value.status_code == 507
        id = begin(api, lines_of(500))
        # Not by the log: that is a file of the process, too, and the limit holds for it.
        wait(lambda: "batch_paused_jobs 1" in frontend.get("/metrics")[1].decode(), lambda: "the batch to pause")
        counts = api.batches.retrieve(id).request_counts
        assert counts is not None
        assert counts.completed < 450
    frontend.kill()
    again = cluster.frontend("room", f"--files-dir={directory}")
    cluster.wait_ready(again, worker)
    with client(again) as api:
        batch = ended(api, id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (450, 50)
        assert len(results(api, batch)) == 500


def test_an_upload_that_is_too_large_leaves_nothing(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    frontend = cluster.frontend("large", f"--files-dir={directory}")
    cluster.wait_ready(frontend, worker)
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{BOUNDARY}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    before = frontend.resident_bytes()

    def pieces() -> Iterator[bytes]:
        yield head.encode()
        for _ in range(300):
            yield b"x" * 2**20

    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=PATIENCE_SECONDS)
    try:
        connection.request(
            "POST", "/v1/files", pieces(), FORM_HEADERS | {"content-length": str(len(head) + 300 * 2**20)}
        )
        answer = connection.getresponse()
        status = answer.status
    except (BrokenPipeError, ConnectionResetError):  # the server stops reading, and may be faster
        status = 413
    finally:
        connection.close()
    assert status == 413
    wait(lambda: list(BatchDirectory(directory).uploads().iterdir()) == [], lambda: "the upload to be gone")
    assert stored(directory) == set()
    assert frontend.resident_bytes() - before < 40 * 2**20


def test_the_command_runs_a_file_and_goes_on_after_an_interruption(
    cluster: Cluster, worker: Worker, tmp_path: Path
) -> None:
    frontend = cluster.frontend("command", f"--files-dir={tmp_path / 'files'}")
    cluster.wait_ready(frontend, worker)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl(lines_of(30)))
    argv = [sys.executable, "-m", "dynamo.cli.main", "batch", "run", str(source), "-o", str(output)]
    argv += ["--url", frontend.url]
    with client(frontend) as api:
        id = begin(api, lines_of(30))
    (tmp_path / "out.jsonl.batch").write_text(id)  # as an interrupted run leaves it
    resumed = cluster.process("resumed", argv)
    assert resumed.exit_code() == 1  # lines failed
    assert f"batch {id}" in resumed.log
    assert "completed: 27 answered, 3 failed, 30 in all" in resumed.log
    assert len(output.read_bytes().splitlines()) == 27
    assert len((tmp_path / "out.jsonl.errors").read_bytes().splitlines()) == 3
    assert not (tmp_path / "out.jsonl.batch").exists()
    assert cluster.process("fresh", argv).exit_code() == 1
    with client(frontend) as api:
        assert len(list(api.batches.list())) == 2


def test_the_memory_of_fifty_thousand_lines_is_flat(cluster: Cluster, worker: Worker, tmp_path: Path) -> None:
    count, executed = 50_000, 3_000
    frontend = cluster.frontend("large", f"--files-dir={tmp_path / 'files'}")
    cluster.wait_ready(frontend, worker)
    with client(frontend) as api:
        file = api.files.create(file=("in.jsonl", jsonl(lines_of(count, wrong_each=100))), purpose="batch")
        memory, used = [frontend.resident_bytes()], cpu_seconds(frontend)
        batch: Any = api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

        def look() -> bool:
            nonlocal batch
            batch = api.batches.retrieve(batch.id)
            memory.append(frontend.resident_bytes())
            return bool(batch.status != "validating")

        wait(look, lambda: f"the check of {batch}")
        assert cpu_seconds(frontend) - used <= 5.0
        grown(api, batch.id, 0, executed)
        memory.append(frontend.resident_bytes())
        api.batches.cancel(batch.id)
        wait(lambda: look() and batch.status in FINAL, lambda: f"the end of {batch}")
        assert batch.status == "cancelled"
        assert (max(memory) - memory[0]) / 2**20 <= 40
        found = set()
        for file_id in (batch.output_file_id, batch.error_file_id):
            for line in api.files.content(file_id).text.splitlines():
                found.add(json.loads(line)["custom_id"])
        assert len(found) == count


def cpu_seconds(frontend: Frontend) -> float:
    """The processor time that a frontend has used (Linux)."""
    fields = Path(f"/proc/{frontend.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

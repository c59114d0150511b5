"""`make test-image`: the images are built, unpacked by umoci and run by runc: not root, a read-only root, no capability."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import distribution
import pytest
from oci_image.__main__ import OUT
from oci_image.__main__ import main as build_image

from dynamo.cli.main import main
from support.container import PORT, PROGRAMS, Container, Network, skip_without, unpack
from support.processes import wait
from support.wheels import write_wheel

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif("IMAGE" not in os.environ, reason="make test-image"),
    pytest.mark.timeout(1800),
]

STREAMS: Final = 6
TOKENS: Final = 600
SERVE: Final = ("dynamo", "serve")
QUESTION: Final = "Count from 3 to 9."
MAX_MEGABYTES: Final = 140  # compressed; 117 when this was written
SOURCE: Final = "https://example.org/source"


@dataclass(frozen=True)
class Unpacked:
    """An image and its root file system."""

    name: str
    config: dict[str, Any]
    root: Path


def build(*arguments: str) -> None:
    assert build_image([*arguments, "--source", SOURCE]) == 0, "the lines above say why"


@contextmanager
def unpacked(name: str, tag: str) -> Iterator[Unpacked]:
    """Have an image unpacked beside it: half a gigabyte, which a folder of pytest's would keep."""
    with tempfile.TemporaryDirectory(prefix="unpacked-", dir=OUT) as folder:
        target = Path(folder) / name
        yield Unpacked(name, unpack(OUT / name, f"{name}:{tag}", target), target / "rootfs")


@pytest.fixture(scope="module")
def server() -> Iterator[Unpacked]:
    skip_without({**PROGRAMS, "mmdebstrap": "mmdebstrap"})
    build("server")
    with unpacked("dynamo-unified", "0.2.0") as found:
        yield found


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(f"dynamo-test-{os.getpid()}") as found:
        yield found


@pytest.fixture
def container(server: Unpacked, network: Network, tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path / "one", server.config, server.root, network) as found:
        yield found


def chat_body(**more: Any) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    return json.dumps(body | more)


def curl(address: str, body: str) -> list[str]:
    url = f"http://{address}:{PORT}/v1/chat/completions"
    return ["curl", "-sSN", "--fail-with-body", url, "-H", "Content-Type: application/json", "-d", body]


def said(answer: str) -> str:
    text: str = json.loads(answer)["choices"][0]["message"]["content"]
    return text


def test_the_labels_and_the_bill_of_materials_are_in_the_image_and_beside_it(server: Unpacked) -> None:
    labels = server.config["annotations"]
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}version"] == "0.2.0"
    assert labels[f"{prefix}revision"] == distribution.revision()[0]
    assert labels[f"{prefix}source"] == SOURCE
    inside = (server.root / "usr/share/sbom/dynamo-unified.cdx.json").read_bytes()
    assert inside == (OUT / "dynamo-unified.cdx.json").read_bytes()
    purls = {each["purl"].split("@")[0] for each in json.loads(inside)["components"]}
    assert {
        "pkg:pypi/dynamo-unified",
        "pkg:pypi/tokenizers",
        "pkg:deb/debian/python3.11",
        "pkg:deb/debian/tini",
    } <= purls
    size = sum(each.stat().st_size for each in (OUT / "dynamo-unified").rglob("*") if each.is_file())
    assert size < MAX_MEGABYTES * 1e6


def test_the_first_commands_of_the_readme_answer_inside_and_outside(
    container: Container, server: Unpacked, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    container.start(*SERVE)
    container.wait_ready()
    seconds = time.monotonic() - begun
    outside = subprocess.run(curl(container.address, chat_body()), check=True, capture_output=True, text=True).stdout
    inside = container.inside(*curl("127.0.0.1", chat_body()))
    assert said(outside) == said(inside) == "3, 4, 5, 6, 7, 8, 9"
    chat = container.execute("dynamo", "chat", "--temperature", "0", QUESTION)
    assert chat.stdout.strip() == said(outside), chat.stderr
    size = sum(each.stat().st_size for each in server.root.rglob("*") if each.is_file() and not each.is_symlink())
    packed = (OUT / "dynamo-unified.oci.tar").stat().st_size
    with capsys.disabled():
        print(f"\nimage: {packed / 1e6:.0f} MB, unpacked {size / 1e6:.0f} MB; ready {seconds:.1f} s after its start")


def test_nothing_in_it_is_root_or_can_become_root_or_write(container: Container) -> None:
    container.start(*SERVE)
    container.wait_ready()
    lines = container.execute("bash", "-c", "id -u; cat /proc/1/status; touch /home/dynamo/x /etc/x /x")
    assert lines.stdout.startswith("10001\n")
    status = dict(line.split(":\t", 1) for line in lines.stdout.splitlines() if ":\t" in line)
    assert status["Uid"].split() == ["10001"] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"
    assert lines.stderr.count("Read-only file system") == 3
    assert "Traceback" not in container.log


def test_sigterm_ends_no_stream_and_turns_the_health_check_red(container: Container, tmp_path: Path) -> None:
    container.start(*SERVE, DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="120", DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="120")
    container.wait_ready()
    assert container.execute("dynamo-ready").returncode == 0
    body = chat_body(stream=True, max_tokens=TOKENS, ignore_eos=True, stream_options={"include_usage": True})
    answers = [tmp_path / f"answer-{number}" for number in range(STREAMS)]
    clients = []
    for path in answers:
        with path.open("wb") as out:
            clients.append(subprocess.Popen(curl(container.address, body), stdout=out))
    wait(lambda: all("content" in path.read_text() for path in answers), lambda: container.log)
    container.signal("TERM")
    red: list[str] = []

    def is_red() -> bool:
        found = container.execute("dynamo-ready")
        red.append(found.stderr)
        return found.returncode == 1

    wait(is_red, lambda: container.log)
    assert "dynamo-ready: " in red[-1]
    assert [client.wait(120) for client in clients] == [0] * STREAMS
    for path in answers:
        *_, usage, done = [line for line in path.read_text().splitlines() if line]
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == TOKENS
    assert container.exit_code() == 0, container.log


def test_a_killed_worker_is_replaced_and_leaves_no_zombie(container: Container) -> None:
    container.start(*SERVE)
    container.wait_ready()
    orphan = int(container.execute("bash", "-c", "sleep 600 > /dev/null 2>&1 & echo $!").stdout)
    (worker,) = (line.split()[1] for line in container.log.splitlines() if line.startswith("worker-1  "))
    container.execute("bash", "-c", f"kill -9 {worker} {orphan}")

    def is_replaced() -> bool:
        return container.log.count("(pid ") >= 2 and container.execute("dynamo-ready").returncode == 0

    wait(is_replaced, lambda: container.log)
    dead = {int(worker), orphan}
    wait(lambda: not dead & container.states().keys(), lambda: str(container.states()))
    assert [each for each in container.states().values() if each[0] == "Z"] == []
    answer = subprocess.run(curl(container.address, chat_body()), check=True, capture_output=True, text=True).stdout
    assert said(answer) == "3, 4, 5, 6, 7, 8, 9"


def answer_of_two(frontend: Container, worker: Container, shared: Path, model: str) -> dict[str, Any]:
    """Start a frontend and a worker that find each other in a shared folder. Return an answer."""
    shared.mkdir()
    shared.chmod(0o777)
    frontend.start(DYN_DISCOVERY_BACKEND="file", DYN_FILE_KV="/shared", shared=shared)
    worker.start(DYN_DISCOVERY_BACKEND="file", DYN_FILE_KV="/shared", shared=shared)
    wait(lambda: "serving HTTP" in frontend.log, lambda: frontend.log)
    frontend.wait_ready()
    body = json.dumps({"model": model, "prompt": "abc", "max_tokens": 3})
    words = curl(frontend.address, body)
    words[3] = words[3].replace("/chat/", "/")
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return found


def test_a_wheel_of_a_user_s_becomes_an_image_whose_worker_serves(
    server: Unpacked, network: Network, tmp_path: Path
) -> None:
    assert main(["new", "my-backend", "--dir", str(tmp_path)]) == 0
    wheel = write_wheel(tmp_path / "my-backend", tmp_path / "wheels")
    build("backend", "--wheel", str(wheel))
    with (
        unpacked("my-backend", wheel.name.split("-")[1]) as mine,
        Container(tmp_path / "frontend", server.config, server.root, network) as frontend,
        Container(tmp_path / "worker", mine.config, mine.root, network) as worker,
    ):
        answer = answer_of_two(frontend, worker, tmp_path / "shared", "my-model")
        assert answer["usage"]["completion_tokens"] == 3
        assert worker.execute("dynamo-ready").returncode == 0
        worker.signal("TERM")
        assert worker.exit_code() == 0, worker.log


def test_a_program_in_rust_becomes_an_image_whose_worker_serves(
    server: Unpacked, network: Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = os.environ.get("RUST_SAMPLE_ENGINE") or str(distribution.ROOT / "rust/target/release/sample-backend")
    if not Path(binary).exists():
        pytest.skip(f"no {binary}: `make test-rust` builds one, and RUST_SAMPLE_ENGINE names it")
    build("rust", "--binary", binary, "--name", "sample-backend")
    with (
        unpacked("sample-backend", "0.0.0") as mine,
        Container(tmp_path / "frontend", server.config, server.root, network) as frontend,
        Container(tmp_path / "worker", mine.config, mine.root, network) as worker,
    ):
        answer = answer_of_two(frontend, worker, tmp_path / "shared", "my-model")
        assert answer["usage"]["completion_tokens"] == 3
        assert worker.execute("id", "-u").stdout == "10001\n"
        worker.signal("TERM")
        assert worker.exit_code() == 0, worker.log
    with capsys.disabled():
        print(f"\nimage in Rust: {(OUT / 'sample-backend.oci.tar').stat().st_size / 1e6:.0f} MB")

"""Cards from somebody who can write to discovery and nothing else: what they make a frontend do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from dynamo.errors import CannotConnect, DynamoException, InvalidArgument
from dynamo.frontend.models.file_policy import FilePolicy, check_url, host_of_instance, path_part
from dynamo.frontend.models.files import ModelFiles
from dynamo.protocol.records import ModelCard
from dynamo.worker.registration import build_card
from support.frontend_cluster import cluster, memory_runtime
from support.patience import PATIENCE_SECONDS

CONTENT = b'{"a": 1}'


def card_with(url: str, *, checksum: str | None = None, size: int = 0, slug: str = "m") -> ModelCard:
    digest = f"blake3:{blake3(CONTENT).hexdigest()}" if checksum is None else checksum
    file = {"path": url, "checksum": digest, "size": size}
    card = build_card("m")
    card.model_info = {"hf_config_json": file}
    card.slug = slug
    return card


class Site:
    """An address that is not a worker's, and what was asked of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[str] = []


@contextmanager
def site(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.requests.append(self.path)
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Site(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def plainly(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT)


@pytest.mark.parametrize("slug", ["../../escaped", "/escaped", "..", ".", "a/../../b", "x" * 300, "a\\b", "a\0b", "ü"])
def test_no_slug_leads_out_of_the_cache(tmp_path: Path, slug: str) -> None:
    cache = tmp_path / "outer" / "inner" / "cache"
    with site(plainly) as worker:
        found = ModelFiles(cache).collect(card_with(f"{worker.url}/x", slug=slug), {"127.0.0.1"}).directory
    assert found is not None
    assert found.resolve().is_relative_to(cache.resolve())
    assert len(found.resolve().relative_to(cache.resolve()).parts) == 2
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.json"]


def test_two_names_never_become_one_part_of_a_path() -> None:
    names = ["a", "a-", "../a", "/a", "a/", "a b", "a\\b", ".a", "..", "", "a" * 100, "a" * 101, "a" * 102, "\ud800"]
    assert len({path_part(name) for name in names}) == len(names)
    assert path_part("Qwen_2.5-7B") == "Qwen_2.5-7B"


def test_no_address_but_the_workers_own_is_fetched_from(tmp_path: Path) -> None:
    with site(plainly) as internal:
        files = ModelFiles(tmp_path / "cache")
        for hosts in ((), {"192.0.2.7"}):
            with pytest.raises(InvalidArgument, match="DYN_MODEL_FILE_HOSTS"):
                files.collect(card_with(f"{internal.url}/secret"), hosts)
        assert internal.requests == []
        allowed = ModelFiles(tmp_path / "cache", FilePolicy(hosts=frozenset({"127.0.0.1"})))
        assert allowed.collect(card_with(f"{internal.url}/x"), {"192.0.2.7"}).directory is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1@169.254.169.254/",
        "http://169.254.169.254#@10.0.0.1/",
        "http://[::1]/",
        "http://10.0.0.1.example/",
        "http:///x",
        "http://10.0.0.1:99999/",
        "http://[10.0.0.1/",
        "HTTP://127.1/",
    ],
)
def test_an_address_that_only_looks_like_the_workers_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        check_url(url, FilePolicy(), {"10.0.0.1"}, lambda host: {"10.0.0.1"} if host == "10.0.0.1" else {"192.0.2.1"})


def test_a_name_of_the_workers_address_is_the_workers_address() -> None:
    addresses = {"worker.svc": {"10.0.0.1"}, "10.0.0.1": {"10.0.0.1"}}
    check_url("https://worker.svc:9090/x", FilePolicy(), {"10.0.0.1"}, lambda host: addresses.get(host, ()))
    check_url("https://WORKER.svc/x", FilePolicy(), {"worker.svc"}, lambda host: ())


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "gopher://127.0.0.1/x", "hf://a/b", "data://x", "//127.0.0.1/x"])
def test_other_schemes_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises((InvalidArgument, CannotConnect)):
        ModelFiles(tmp_path / "cache").collect(card_with(url), {"127.0.0.1"})


def test_a_file_whose_content_the_card_does_not_know_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the operator's")
    for checksum in ("", "blake3:" + "0" * 64, "sha256:" + "0" * 64):
        card = build_card("m")
        file = {"path": f"file://{secret}", "checksum": checksum, "size": 0}
        card.chat_template_file = {"hf_chat_template_jinja": {"is_custom": True, "file": file}}
        with pytest.raises(DynamoException, match=r"checksum|hashes to") as caught:
            ModelFiles(tmp_path / "cache").collect(card)
        assert "operator" not in str(caught.value)


def test_local_files_can_be_switched_off(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(CONTENT)
    files = ModelFiles(tmp_path / "cache", FilePolicy(schemes=frozenset({"http"})))
    for url in (str(path), f"file://{path}"):
        with pytest.raises(InvalidArgument, match="DYN_MODEL_FILE_SCHEMES"):
            files.collect(card_with(url))


def test_files_that_never_end_are_not_read(tmp_path: Path) -> None:
    """Nor those that block whoever reads them."""
    for path in ("/dev/zero", "/proc/kmsg"):
        with pytest.raises(DynamoException):
            ModelFiles(tmp_path / "cache").collect(card_with(path))


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with site(plainly) as internal:

        def elsewhere(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("location", internal.url)
            handler.end_headers()

        with site(elsewhere) as worker, pytest.raises(CannotConnect, match="302; redirects are not followed"):
            ModelFiles(tmp_path / "cache").collect(card_with(f"{worker.url}/x"), {"127.0.0.1"})
        assert internal.requests == []


def test_a_file_longer_than_its_card_says_is_cut(tmp_path: Path) -> None:
    with site(plainly) as worker, pytest.raises(InvalidArgument, match="longer than the 3 bytes"):
        ModelFiles(tmp_path / "cache").collect(card_with(f"{worker.url}/x", size=3), {"127.0.0.1"})
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_the_files_of_a_card_have_one_budget_of_bytes(tmp_path: Path) -> None:
    with site(plainly) as worker:
        card = card_with(f"{worker.url}/x")
        card.gen_config = {"hf_generation_config_json": (card.model_info or {})["hf_config_json"]}
        policy = FilePolicy(card_bytes=2 * len(CONTENT) - 1)
        with pytest.raises(InvalidArgument, match="DYN_MODEL_CARD_LIMIT_MB"):
            ModelFiles(tmp_path / "cache", policy).collect(card, {"127.0.0.1"})


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_worker_that_drips_is_left_in_time(tmp_path: Path, part: str) -> None:
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(10_000)
                peer.sendall(b"HTTP/1.1 200 OK\r\n" + (b"content-length: 1000\r\n\r\n" if part == "body" else b""))
                while not done.wait(0.02):
                    try:
                        peer.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            files = ModelFiles(tmp_path / "cache", FilePolicy(seconds=0.3))
            with pytest.raises(CannotConnect, match="DYN_MODEL_FILE_TIMEOUT_SECS"):
                files.collect(card_with(f"http://127.0.0.1:{listener.getsockname()[1]}/x"), {"127.0.0.1"})
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("transport", "host"),
    [
        ({"tcp": "10.0.0.1:80/path"}, "10.0.0.1"),
        ({"tcp": "[fd00::1]:80/path"}, "fd00::1"),
        ({"tcp": "Worker:80/p"}, "worker"),
        ({"tcp": "[10.0.0.1"}, None),
        ({"tcp": 7}, None),
        ({"nats_tcp": "subject"}, None),
        ("x", None),
        (None, None),
    ],
)
def test_the_host_of_an_instance_is_read_from_its_record(transport: Any, host: str | None) -> None:
    assert host_of_instance({"transport": transport}) == host


async def test_a_frontend_asks_no_address_that_is_no_workers(tmp_path: Path) -> None:
    with site(plainly) as internal:
        async with cluster(tmp_path) as house:
            runtime = memory_runtime()
            try:
                endpoint = runtime.endpoint("ns.backend.generate")
                served = await endpoint.start_serving(_nobody)
                await endpoint.publish_model(card_with(f"{internal.url}/secret").to_json())
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while house.metric("dynamo_frontend_model_load_failures_total", model="m") < 1:
                        await asyncio.sleep(0.01)
                ready = await house.client.get("/v1/models/m/ready")
                assert "DYN_MODEL_FILE_HOSTS" in ready.json["namespaces"]["ns"]["error"]
                assert served is not None
            finally:
                await runtime.aclose()
    assert internal.requests == []


async def _nobody(body: Any, context: Any, sink: Any) -> None:
    raise AssertionError("a model that is not loaded got a request")

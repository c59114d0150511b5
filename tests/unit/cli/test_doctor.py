"""The checks of `dynamo doctor`, each by itself, and the command."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli.doctor import command, network, variables
from dynamo.cli.doctor.command import CHECKS, examine
from dynamo.cli.doctor.diagnosis import CheckLevel, Diagnosis, Examined
from dynamo.cli.inspect.client import InspectorClient
from dynamo.cli.main import main
from dynamo.runtime.http.inspector_token import InspectorAccess, publish_access
from support.cases import each_case
from support.certificates import Authority
from support.inspector_pictures import demo_picture, ready_picture
from support.inspector_server import inspector_server
from support.patience import PATIENCE_SECONDS
from support.ports import held_port

OK, WARNING, ERROR = CheckLevel.OK, CheckLevel.WARNING, CheckLevel.ERROR
GIB = 1 << 30


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is slow because this machine does other things as well."""
    monkeypatch.setattr(network, "TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(network, "SLOW_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(command, "CLOCK_SECONDS", PATIENCE_SECONDS)


def examined(url: str = "http://127.0.0.1:1", *, names_frontend: bool = False, **env: str) -> Examined:
    settings = variables.read_frontend_settings(env)
    return Examined(env, settings, InspectorClient(url, None), settings.http_port or 0, names_frontend=names_frontend)


def levels(found: Iterator[Diagnosis]) -> list[CheckLevel]:
    return [one.level for one in found]


@contextmanager
def listening(greeting: bytes) -> Iterator[int]:
    """A port that greets whoever connects first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_SECONDS)

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(greeting)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


# -- judgements --------------------------------------------------------------------------------------------------------


@each_case(
    ("made", "level"),
    [
        (command.clock_off("x", 0.4), OK),
        (command.clock_off("x", -5.0), WARNING),
        (command.clock_off("x", 3600.0), ERROR),
        (command.file_limit(65_536, 65_536, 20_480), OK),
        (command.file_limit(-1, -1, 20_480), OK),
        (command.file_limit(4096, 65_536, 20_480), WARNING),
        (command.file_limit(256, -1, 20_480), ERROR),
        (command.disk_room("/x", 50 * GIB), OK),
        (command.disk_room("/x", GIB), WARNING),
        (command.disk_room("/x", 1 << 20), ERROR),
        (command.shared_memory_room(8 * GIB), OK),
        (command.shared_memory_room(64 << 20), WARNING),
        (command.process_count(8, 4), OK),
        (command.process_count(2, 4), WARNING),
        (network.round_trip("etcd", 0.01), OK),
        (network.round_trip("etcd", 1.0), WARNING),
    ],
)
def test_a_judgement(made: Diagnosis, level: CheckLevel) -> None:
    assert made.level is level
    assert made.finding
    assert bool(made.advice) is (level is not OK)


def test_this_machine_can_be_looked_at() -> None:
    for check in (command.clocks, command.files, command.disks, command.processors, command.loopback):
        assert list(check(examined())), check.__name__
    assert len(list(command.shared_memory(examined()))) == Path("/dev/shm").is_dir()


def test_the_clock_of_a_frontend_is_that_of_its_pictures() -> None:
    with inspector_server(demo_picture(taken_ms=int(time.time() * 1000) + 6_000_000)) as server:
        found = list(command.clocks(examined(server.url)))
    assert [one.level for one in found] == [OK, ERROR]
    ahead = re.search(r"([0-9]+) s ahead", found[1].finding)
    assert ahead is not None
    assert 6000 - PATIENCE_SECONDS < int(ahead[1]) <= 6000  # less what it took to ask


def test_nobody_is_told_to_set_the_limit_that_is_set() -> None:
    assert "4096" not in command.file_limit(4096, 4096, 20_480).advice
    assert "65536" in command.file_limit(4096, 65_536, 20_480).advice


@contextmanager
def dated(at: float, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server whose clock shows `at`, and which is etcd as well; with `tls`: over HTTPS."""

    class Handler(BaseHTTPRequestHandler):
        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(at)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"health": "true"}' if self.path == "/health" else b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# -- the network -------------------------------------------------------------------------------------------------------


def test_a_port_that_another_program_has_is_an_error() -> None:
    with held_port() as port:
        with socket.create_server(("127.0.0.1", port)):
            found = network.port_use("DYN_HTTP_PORT", "127.0.0.1", port, is_ours=False)
            assert found.level is ERROR
            assert str(port) in found.finding
            assert network.port_use("DYN_HTTP_PORT", "127.0.0.1", port, is_ours=True).level is OK
        assert network.port_use("DYN_HTTP_PORT", "127.0.0.1", port, is_ours=False).level is OK


def test_the_file_store_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    assert network.file_store(tmp_path / "not" / "yet").level is OK
    assert list(tmp_path.iterdir()) == []
    assert network.file_store(Path("/proc/here")).level is ERROR


def test_an_etcd_that_answers_and_one_that_does_not() -> None:
    with dated(0.0) as url:
        assert network.etcd_answer(url).level is OK
        assert network.etcd_answer(f"{url}/elsewhere").level is ERROR
        host = url.removeprefix("http://")
        assert levels(network.discovery(examined(ETCD_ENDPOINTS=f"{host}, {url}/"))) == [OK]
    with held_port() as port:
        assert network.etcd_answer(f"http://127.0.0.1:{port}").level is ERROR


def test_etcd_is_asked_directly_as_processes_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with dated(0.0) as url, held_port() as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert network.etcd_answer(url).level is OK


@pytest.mark.parametrize(
    "wrong", [{"ETCD_ENDPOINTS": "http://["}, {"ETCD_ENDPOINTS": "h:1", "ETCD_AUTH_CA": "/nowhere.pem"}], ids=str
)
def test_settings_of_etcd_that_no_process_starts_with_are_an_error(wrong: dict[str, Any]) -> None:
    (found,) = network.discovery(examined(**wrong))
    assert found.level is ERROR
    assert "ETCD_" in found.finding


def test_an_etcd_with_tls_is_asked_with_its_certificates(tmp_path: Path) -> None:
    authority, tls = Authority(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue())
    with dated(0.0, tls) as url:
        trusted = examined(ETCD_ENDPOINTS=url, ETCD_AUTH_CA=authority.path)
        assert levels(network.discovery(trusted)) == [OK]
        (found,) = network.discovery(examined(ETCD_ENDPOINTS=url))
        assert found.level is ERROR
        assert "certificate" in found.finding


def test_discovery_names_its_store(tmp_path: Path) -> None:
    assert levels(network.discovery(examined(DYN_FILE_KV=str(tmp_path)))) == [OK]
    assert levels(network.discovery(examined(DYN_FILE_KV=str(tmp_path), DYN_DISCOVERY_BACKEND="etcd"))) == [WARNING, OK]
    assert levels(network.discovery(examined(DYN_DISCOVERY_BACKEND="kubernetes"))) == [ERROR]
    assert levels(network.discovery(examined(DYN_DISCOVERY_BACKEND="mem"))) == [OK]
    assert levels(network.discovery(examined(ETCD_ENDPOINTS="http://127.0.0.1:1,127.0.0.1:2"))) == [ERROR, ERROR]


def test_nats_is_told_by_its_greeting() -> None:
    with listening(b'INFO {"server_id": "x"}\r\n') as port:
        assert network.nats_greeting(f"nats://127.0.0.1:{port}").level is OK
    with listening(b"HTTP/1.1 400 Bad Request\r\n") as port:
        assert "is not NATS" in network.nats_greeting(f"127.0.0.1:{port}").finding
    with held_port() as port:
        assert network.nats_greeting(f"nats://127.0.0.1:{port}").level is ERROR
    assert list(network.nats(examined())) == []  # nothing uses it
    assert levels(network.nats(examined(DYN_EVENT_PLANE="nats", NATS_SERVER="nats://127.0.0.1:1"))) == [ERROR]


def test_the_frontend_says_what_is_wrong() -> None:
    with inspector_server(ready_picture()) as server:
        assert levels(network.frontend(examined(server.url))) == [OK]
        server.picture = demo_picture()
        found = list(network.frontend(examined(server.url)))
        assert "model dynamo/big: not ready" in found[0].finding
        server.key = "s3cret"
        assert levels(network.frontend(examined(server.url))) == [WARNING]
    with held_port() as port:
        nobody = f"http://127.0.0.1:{port}"
        assert levels(network.frontend(examined(nobody))) == [OK]  # none has to run
        assert levels(network.frontend(examined(nobody, names_frontend=True))) == [ERROR]


# -- certificates ------------------------------------------------------------------------------------------------------


def test_pairs_of_certificate_and_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("serve.example", "127.0.0.1")
    _, other = authority.issue("serve.example")
    good = list(network.pair("DYN_TLS", certificate, key))
    assert levels(iter(good)) == [OK]
    assert "serve.example, 127.0.0.1" in good[0].finding
    assert "is not the key of" in next(network.pair("DYN_TLS", certificate, other)).finding
    assert "there is no file" in next(network.pair("DYN_TLS", certificate, str(tmp_path / "none"))).finding
    authority.spoil(certificate)
    assert "cannot be used" in next(network.pair("DYN_TLS", certificate, key)).finding
    half = examined(DYN_TLS_CERT_PATH=certificate)
    assert [one.advice for one in network.certificates(half)] == ["set DYN_TLS_KEY_PATH"]


@each_case(
    ("begins", "ends", "names", "level"),
    [
        (-90, 90, True, OK),
        (-90, 3, True, WARNING),
        (-90, -1, True, ERROR),
        (1, 90, True, ERROR),
        (-1, 90, False, ERROR),
    ],
)
def test_the_dates_and_names_of_a_certificate(begins: int, ends: int, names: bool, level: CheckLevel) -> None:
    now = ssl.cert_time_to_seconds("Jan  5 09:34:43 2030 GMT")

    def date(days: int) -> str:
        return time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime(now + 86_400 * days))

    plain: dict[str, Any] = {"notBefore": date(begins), "notAfter": date(ends)}
    if names:
        plain["subjectAltName"] = (("DNS", "serve.example"),)
    assert network.validity("DYN_TLS", plain, now).level is level


def test_a_chain_is_tried_in_a_handshake(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path / "other", "stranger")
    certificate, key = authority.issue("serve.example")
    assert network.chain(certificate, key, authority.path, None).level is OK
    assert network.chain(certificate, key, authority.path, "serve.example").level is OK
    assert "mismatch" in network.chain(certificate, key, authority.path, "other.example").finding
    assert network.chain(certificate, key, stranger.path, None).level is ERROR
    assert network.chain(certificate, key, str(tmp_path / "none"), None).level is ERROR
    wire: dict[str, Any] = {
        "DYN_TCP_TLS_CERT_PATH": certificate,
        "DYN_TCP_TLS_KEY_PATH": key,
        "DYN_TCP_TLS_CA_CERT_PATH": stranger.path,
    }
    assert levels(network.certificates(examined(**wire))) == [OK, ERROR]


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_variable_that_nothing_reads_gets_its_near_miss() -> None:
    known = variables.known_variables()
    assert {"DYN_HTTP_PORT", "ETCD_ENDPOINTS", "DYN_FILE_KV"} <= known
    found = list(
        variables.unknown_variables({"DYN_HTPP_PORT": "1", "DYN_HTTP_PORT": "2", "HOME": "/", "DYN_QQQQQQQ": ""}, known)
    )
    assert [one.finding for one in found] == ["nothing reads DYN_HTPP_PORT", "nothing reads DYN_QQQQQQQ"]
    assert found[0].advice == "did you mean DYN_HTTP_PORT?"


def test_a_value_that_cannot_be_read_is_an_error() -> None:
    found = list(variables.variables(examined(DYN_HTTP_MAX_CONNECTIONS="many")))
    assert any(one.level is ERROR and "DYN_HTTP_MAX_CONNECTIONS" in one.finding for one in found)


@each_case(
    ("env", "parts"),
    [
        ({"DYN_HTTP_PORT": "99999"}, ["DYN_HTTP_PORT: 99999 is not a port", "a frontend does not start"]),
        ({"DYN_ROUTER_MODE": "zzz"}, ["DYN_ROUTER_MODE: 'zzz' is unknown"]),
        ({"DYN_DISCOVERY_BACKEND": "zzz"}, ["DYN_DISCOVERY_BACKEND: 'zzz' is unknown"]),
        ({"DYN_ENDPOINT_TYPES": "bla"}, ["unknown endpoint type 'bla'", "a worker does not start"]),
        ({"DYN_TOOL_CALL_PARSER": "zz"}, ["DYN_TOOL_CALL_PARSER: 'zz' is unknown"]),
        ({"DYN_KEYS": "/no/keys"}, ["/no/keys cannot be read", "a frontend does not start"]),
        ({"DYN_API_KEY": "a b"}, ["DYN_API_KEY: an imported key has 16 to 512 bytes"]),
        ({"DYN_TLS_CERT_PATH": "/no/cert"}, ["--tls-cert-path and --tls-key-path need each other"]),
        ({"DYN_CUSTOM_JINJA_TEMPLATE": "/no/t"}, ["there is no file /no/t"]),
        ({"DYN_CORS_ORIGINS": "zz"}, ["DYN_CORS_ORIGINS: 'zz' is not an origin"]),
        ({"DYN_RESPONSES_STORE": "foo"}, ["DYN_RESPONSES_STORE: 'foo' is not memory"]),
        ({"DYN_HEALTH_CHECK_PAYLOAD": "{x"}, ["DYN_HEALTH_CHECK_PAYLOAD is not usable", "the default holds"]),
        ({"DYN_LOG": "a=b=c"}, ["DYN_LOG: 'a=b=c' is neither a level", "the default holds"]),
        ({"DYN_SYSTEM_PORT": "abc"}, ["DYN_SYSTEM_PORT: 'abc' is not an integer", "the default holds"]),
        ({"DYN_FILES_DIR": "/dev/null/x"}, ["DYN_FILES_DIR: /dev/null is a file"]),
        ({"DYN_USAGE_DB": "/dev/null/x"}, ["DYN_USAGE_DB: /dev/null is a file"]),
        ({"DYN_HTTP_PORT": "x", "DYN_ROUTER_MODE": "y", "DYN_LOG": "a=b=c"}, ["DYN_HTTP_PORT", "DYN_ROUTER_MODE", "DYN_LOG"]),
    ],
)  # fmt: skip
def test_what_a_start_refuses_is_found(env: dict[str, Any], parts: list[str]) -> None:
    found = [one.finding for one in variables.variables(examined(**env)) if one.level is ERROR]
    assert [part for part in parts if not any(part in finding for finding in found)] == []
    assert len(found) == len(set(found))


def test_a_clean_environment_has_no_finding() -> None:
    assert [one for one in variables.variables(examined()) if one.level is not OK] == []


@each_case(
    ("env", "part"),
    [
        ({"DYN_TCP_TLS_INSECURE": "1", "DYN_TCP_TLS_CA_CERT_PATH": "/ca"}, "DYN_TCP_TLS_INSECURE"),
        ({"ETCD_ENDPOINTS": "x:1", "DYN_DISCOVERY_BACKEND": "file"}, "ETCD_ENDPOINTS is set"),
        ({"ETCD_AUTH_USERNAME": "x"}, "only one is set"),
        ({"DYN_TCP_CREDIT_STALL_SECS": "1"}, "DYN_TCP_CREDIT_STALL_SECS is below"),
    ],
)
def test_settings_that_contradict_each_other(env: dict[str, Any], part: str) -> None:
    assert list(variables.contradictions(examined())) == []
    assert any(part in one.finding for one in variables.contradictions(examined(**env)))


# -- what is installed and left ----------------------------------------------------------------------------------------


def test_versions_are_named() -> None:
    texts = " ".join(one.finding for one in command.versions(examined()))
    assert "msgspec" in texts
    assert f"Python {sys.version_info.major}." in texts


def test_a_token_file_of_a_dead_frontend_is_a_leftover(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    env: dict[str, Any] = {"XDG_RUNTIME_DIR": str(tmp_path)}
    publish_access(8002, InspectorAccess("http://127.0.0.1:8002", "t", os.getpid()), env)
    publish_access(8001, InspectorAccess("http://127.0.0.1:8001", "t", int(done.stdout)), env)
    found = list(command.leftovers(examined(**env)))
    assert [one.level for one in found] == [WARNING, OK]
    assert "has gone" in found[0].finding
    (tmp_path / "dynamo" / "inspect-8002.json").chmod(0o644)
    (tmp_path / "dynamo" / "inspect-8001.json").write_bytes(b"{")
    assert levels(command.leftovers(examined(**env))) == [WARNING, ERROR]
    assert levels(command.leftovers(examined(XDG_RUNTIME_DIR=str(tmp_path / "none")))) == [OK]


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_check_that_fails_itself_does_not_end_the_others() -> None:
    def broken(_: Examined) -> Iterator[Diagnosis]:
        raise ZeroDivisionError("oh")
        yield

    found = list(examine(examined(), {"broken": broken, "loopback": command.loopback}))
    assert found[0] == (
        "broken",
        Diagnosis.bad("the check itself failed: ZeroDivisionError: oh", "report this: a check must not fail"),
    )
    assert len(found) > 1


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("DYN_", "ETCD_", "NATS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.mark.usefixtures("clean")
def test_every_check_is_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {one["check"] for one in report["findings"]} >= set(CHECKS) - {"NATS", "certificates", "shared memory"}
    assert [one for one in report["findings"] if "itself failed" in one["finding"]] == []
    assert status == ("ok", "warning", "error").index(report["status"])


@pytest.mark.usefixtures("clean")
def test_errors_are_status_2_and_say_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
    monkeypatch.setenv("DYN_HTPP_PORT", "1")
    assert main(["doctor"]) == 2
    out = capsys.readouterr().out
    assert "ERROR    discovery: etcd at http://127.0.0.1:1 cannot be reached" in out
    assert "         -> start it, or mend ETCD_ENDPOINTS" in out
    assert "warning  settings: nothing reads DYN_HTPP_PORT" in out
    assert "\nok " not in out
    assert main(["doctor", "--all"]) == 2
    assert "\nok " in capsys.readouterr().out

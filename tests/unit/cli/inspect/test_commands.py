"""`dynamo top --once` and `dynamo status` against a server on a real socket."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dynamo.cli import status
from dynamo.cli.main import main
from dynamo.cli.status import troubles_of
from dynamo.protocol.inspector.views import CountersView, Picture
from support.cases import each_case
from support.inspector_pictures import FLEET, FRONTENDS, MODELS, WORKERS, demo_picture, many_streams, ready_picture
from support.inspector_server import InspectorServer, inspector_server
from support.ports import held_port


@pytest.fixture
def server() -> Iterator[InspectorServer]:
    with inspector_server(demo_picture()) as found:
        yield found


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_API_KEY", "DYN_HTTP_PORT"):
        monkeypatch.delenv(name, raising=False)


# -- top ---------------------------------------------------------------------------------------------------------------


def test_once_shows_workers_and_streams_as_text(server: InspectorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--plain", "--url", server.url]) == 0
    out = capsys.readouterr().out
    for word in (
        "demo-cluster",
        "─ Workers 4",
        "quarantined",
        "─ Streams 3, 1 stalled",
        "chatcmpl-9c03beef",
        "STALLED",
    ):
        assert word in out
    assert server.queries("/admin/v1/snapshot")[-1]["views"] == ["fleet,workers,streams"]


def test_once_shows_the_asked_views_no_wider_than_asked(
    server: InspectorServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--url", server.url, "--view", "models,errors", "--width", "80"]) == 0
    out = capsys.readouterr().out
    assert "NOT READY" in out
    assert "─ Errors 2" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_the_picture_as_the_server_gave_it(server: InspectorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--url", server.url, "--view", "frontends"]) == 0
    found = capsys.readouterr().out
    expected = msgspec.structs.replace(server.picture, **dict.fromkeys(("models", "residents", "workers", "streams", "recent", "routing", "caches", "prefixes", "errors", "events")))  # fmt: skip
    assert json.loads(found) == msgspec.to_builtins(expected)
    assert msgspec.json.decode(found, type=Picture) == expected


def test_json_of_hostile_texts_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = [msgspec.structs.replace(many_streams(1)[0], model="\x1b[2J\u202e\x9b")]
    with inspector_server(demo_picture(streams=hostile)) as server:
        assert main(["top", "--once", "--json", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert out.strip().isprintable()
    assert json.loads(out)["streams"][0]["model"] == "\x1b[2J\u202e\x9b"


def test_the_port_is_that_of_the_environment(
    server: InspectorServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_PORT", str(server.port))
    assert main(["top", "--once"]) == 0
    assert "demo-cluster" in capsys.readouterr().out


def test_the_key_is_that_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_API_KEY", "s3cret")
    with inspector_server(demo_picture(), key="s3cret") as server:
        assert main(["top", "--once", "--url", server.url]) == 0
        assert main(["top", "--once", "--url", server.url, "--key", "wrong"]) == 1
    assert "--key or DYN_API_KEY" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with held_port() as port:
        assert main(["top", "--once", "--url", f"http://127.0.0.1:{port}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dynamo top: no answer from http://127.0.0.1:")
    assert error.count("\n") == 1


@each_case(
    ("argv", "message"),
    [
        (["--json"], "--plain, --json and --width need --once"),
        ([], "the live screen needs a terminal; use --once in a pipe"),
        (["--once", "--url", "ftp://x"], "'ftp://x' is not an HTTP address"),
    ],
)
def test_mistakes_of_use(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_view_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["top", "--once", "--view", "workers,planets"])
    assert "'planets' is not a view; there is fleet, frontends, models" in capsys.readouterr().err


def test_without_textual_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["top"]) == 2
    assert "pip install 'textual<9,>=8'; dynamo top --once works without it" in capsys.readouterr().err


# -- status ------------------------------------------------------------------------------------------------------------


def test_all_ready_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    with inspector_server(ready_picture()) as server:
        assert main(["status", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ready  {server.url}  demo-cluster, up 3d\n")
    assert out.endswith("nothing is wrong\n")


def test_what_is_not_ready_is_status_1_and_named(server: InspectorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", server.url]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NOT READY")
    assert "! model dynamo/big: not ready: no decode worker" in out
    assert "! worker 694d9a3c5d8f7ea1: quarantined: connect refused" in out
    assert "- requests: 1 stalled" in out


def test_as_json(server: InspectorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", "--url", server.url]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["is_ready"], found["url"]) == (False, server.url)
    assert {"subject": "model dynamo/big", "text": "not ready: no decode worker: a model with prefill workers needs one",
            "is_unready": True} in found["troubles"]  # fmt: skip
    assert [worker["state"] for worker in found["workers"]] == ["ready", "ready", "quarantined", "draining"]


@each_case("argv", [[], ["--json"]])
def test_a_server_that_is_not_there_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with held_port() as port:
        assert main(["status", "--url", f"http://127.0.0.1:{port}", *argv]) == 2
    shown = capsys.readouterr()
    if argv:
        assert json.loads(shown.out)["is_ready"] is None
        assert "no answer" in json.loads(shown.out)["error"]
    else:
        assert "no answer" in shown.err


def test_a_key_that_may_not_ask_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with inspector_server(demo_picture(), key="s3cret") as server:
        assert main(["status", "--url", server.url]) == 2
    assert "--key" in capsys.readouterr().err


def test_the_help_says_what_each_status_means() -> None:
    text = status.build_parser({}).format_help()
    for line in ("0  all is ready", "1  something is not", "2  the frontend cannot be reached"):
        assert line in text


@each_case(
    ("changes", "subject", "is_unready"),
    [
        ({"models": []}, "models", True),
        ({"models": MODELS}, "model dynamo/big", True),
        ({"partial": ["fe-2"]}, "frontend fe-2", True),
        ({"frontends": [msgspec.structs.replace(FRONTENDS[0], stage="draining")]}, "frontend fe-1", True),
        ({"workers": [msgspec.structs.replace(WORKERS[0], state="starting")]}, f"worker {WORKERS[0].id}", True),
        ({"workers": WORKERS[2:3]}, f"worker {WORKERS[2].id}", True),
        ({"workers": WORKERS[3:]}, f"worker {WORKERS[3].id}", False),
        ({"streams": demo_picture().streams}, "requests", False),
        ({"fleet": msgspec.structs.replace(FLEET, now=CountersView(error_share=0.5))}, "requests", False),
        ({"fleet": msgspec.structs.replace(FLEET, now=CountersView(shed_per_second=2.0))}, "requests", False),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], subject: str, is_unready: bool) -> None:
    assert list(troubles_of(ready_picture())) == []
    assert [(one.subject, one.is_unready) for one in troubles_of(ready_picture(**changes))] == [(subject, is_unready)]

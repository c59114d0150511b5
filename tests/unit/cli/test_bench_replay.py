"""`dynamo bench replay`: its command line, tables, files and bars."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dynamo.cli.bench.replay.command import main
from dynamo.cli.bench.replay.options import read_options
from dynamo.cli.main import main as dynamo
from dynamo.cli.usage import UsageError
from dynamo.replay.presets import PRESETS, Bar
from dynamo.replay.trace import prompt_token_ids

FEW = ["--requests", "40", "--mode", "round-robin", "--mode", "kv:default"]


def test_a_preset_is_shown_as_a_table_with_a_row_for_each_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert dynamo(["bench", "replay", "1k", *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (line for line in lines if "of pooled" in line and "TTFT" in line)
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("round-robin", "kv:default"))}
    assert set(rows) == {"round-robin", "kv:default"}
    assert float(rows["kv:default"][1]) > float(rows["round-robin"][1]) > 0
    assert head.index("hits") < head.index("e2e ms")
    assert any("80 requests in" in line for line in lines)


def test_the_files_hold_the_same_figures(tmp_path: Path) -> None:
    names = ("figures.json", "page.html", "plot.svg", "requests.jsonl")
    flags = ("--json", "--html", "--svg", "--per-request")
    files = dict(zip(flags, (tmp_path / name for name in names), strict=True))
    given = [text for flag, path in files.items() for text in (flag, str(path))]
    assert main(["1k", *FEW, "--seeds", "3,5", "--no-cpu", *given]) == 0
    figures = json.loads(files["--json"].read_text())["presets"]["1k"]
    assert [(each["seed"], each["mode"]) for each in figures["replays"]] == [
        (3, "round-robin"), (3, "kv:default"), (5, "round-robin"), (5, "kv:default"),
    ]  # fmt: skip
    mean = sum(each["mean_ttft_ms"] for each in figures["replays"][::2]) / 2
    assert figures["rows"]["round-robin"]["mean_ttft_ms"] == pytest.approx(mean)
    requests = [json.loads(line) for line in files["--per-request"].read_text().splitlines()]
    assert len(requests) == 160
    first = [each["ttft_ms"] for each in requests if each["seed"] == 3 and each["mode"] == "round-robin"]
    assert sum(first) / 40 == pytest.approx(figures["replays"][0]["mean_ttft_ms"], abs=1e-3)
    assert files["--svg"].read_text().startswith("<svg")
    assert "kv:default" in files["--svg"].read_text()
    assert "<table>" in files["--html"].read_text()


def test_a_trace_that_was_written_is_replayed_as_the_preset_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, one, two = tmp_path / "trace.jsonl", tmp_path / "1.json", tmp_path / "2.json"
    blocks = ["--trace-block-tokens", "16"]
    assert main(["1k", "--requests", "40", "--write-trace", str(trace), *blocks]) == 0
    sizes = ["--workers", "8", "--gpu-blocks", "1536", "--block-size", "16", "--mode", "round-robin", "--no-cpu"]
    assert main(["--trace", str(trace), *blocks, *sizes, "--json", str(one)]) == 0
    assert main(["1k", "--requests", "40", *sizes, "--json", str(two)]) == 0
    read, drawn = (json.loads(path.read_text())["presets"] for path in (one, two))
    assert read["trace.jsonl"]["replays"][0]["mean_ttft_ms"] == drawn["1k"]["replays"][0]["mean_ttft_ms"]
    assert f"wrote {trace}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["2k"], "no preset '2k'"),
        (["1k", "--mode", "fastest"], "no mode 'fastest'"),
        (["1k", "--seeds", "x", "--mode", "random"], "--seeds"),
        (["1k", "--event-loss", "2", "--mode", "random"], "--event-loss"),
        (["1k", "--json", "/nowhere/x.json", "--mode", "random"], "cannot write"),
        (["1k", "--trace", "x.jsonl", "--mode", "random"], "--trace brings its own"),
        (["1k", "4k", "--write-trace", "x.jsonl", "--mode", "random"], "name one preset"),
        (["--trace", "missing.jsonl", "--mode", "random"], "cannot read missing.jsonl"),
    ],
)
def test_an_error_of_use_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = dynamo(["bench", "replay", *arguments])
    except SystemExit as left:  # argparse's way
        status = int(str(left.code))
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_bad_line_of_a_trace_names_file_line_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 0, "input_length": "x"}\n')
    assert dynamo(["bench", "replay", "--trace", str(trace), "--mode", "random"]) == 2
    assert "bad.jsonl: line 2: input_length" in capsys.readouterr().err


def test_a_missed_bar_is_status_1_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = (Bar("mean_ttft_ms", "round-robin", 0.001),)
    monkeypatch.setattr("dynamo.cli.bench.replay.command.read_options", _with_bars(bars))
    arguments = ["1k", *FEW, "--no-cpu"]
    assert main(arguments) == 0
    assert main([*arguments, "--strict"]) == 1


def _with_bars(bars: tuple[Bar, ...]):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    import msgspec

    def read(argv: list[str]):  # type: ignore[no-untyped-def]
        options = read_options(argv)
        return replace(options, presets=tuple(msgspec.structs.replace(each, bars=bars) for each in options.presets))

    return read


def test_a_bar_is_a_figure_or_a_ratio() -> None:
    rows = {"a": {"f": 6.0}, "b": {"f": 3.0}}
    assert Bar("f", "a", 2.0, "b").value(rows) == 2.0
    assert Bar("f", "a", 2.0, "b").holds(2.0)
    assert not Bar("f", "a", 2.0, "b", is_least=True).holds(1.9)
    assert Bar("f", "c", 1.0).value(rows) is None


def test_every_preset_draws_its_trace() -> None:
    for preset in PRESETS.values():
        assert len(preset.make_trace(1, 20).requests) >= 20


class _Server(BaseHTTPRequestHandler):
    """Answers completions with two tokens, and counts 16 tokens of each prompt as cached."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        events = [{"choices": [{"text": text}]} for text in "ab"] + [{"choices": [], "usage": usage}]
        body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


def test_a_live_server_is_sent_the_same_prompts_and_is_one_more_row(capsys: pytest.CaptureFixture[str]) -> None:
    _Server.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        live = ["--live", url, "--model", "m", "--requests", "30", "--speedup", "20", "--mode", "random"]
        assert main(["1k", *live]) == 0
        server.shutdown()
    trace = PRESETS["1k"].make_trace(0, 30)
    prompts = [prompt_token_ids(request).tolist() for request in trace.requests]
    assert sorted(asked["prompt"] for asked in _Server.asked) == sorted(prompts)
    assert all(asked["model"] == "m" and asked["stream"] for asked in _Server.asked)
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("live  "))
    assert float(row[1]) == pytest.approx(30 * 16 / trace.prompt_tokens, abs=1e-3)


def test_live_needs_the_name_of_a_model() -> None:
    with pytest.raises(UsageError, match="--model"):
        read_options(["1k", "--mode", "random", "--live", "http://127.0.0.1:1"])

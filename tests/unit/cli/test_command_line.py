from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dynamo import __version__
from dynamo.cli import engine_choice, packaged_models
from dynamo.cli.engines import load_engine
from dynamo.cli.main import COMMANDS, main
from dynamo.cli.usage import UsageError
from dynamo.common._version import __version__ as native_version
from dynamo.frontend.http.server import PortInUse
from dynamo.runtime.calls.request_plane.mux.frames import VERSION
from support.cases import each_case
from support.serve_command import GUIDE_ENGINE


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with an engine in it, forgotten afterwards."""
    (tmp_path / "guide_engine.py").write_text(GUIDE_ENGINE)
    for name in ("m.gguf", "alone.safetensors", "m.pth", "m.tar.gz", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "gguf-in-disguise").write_bytes(b"GGUF\x03\x00")
    for name in ("model", "empty"):
        (tmp_path / name).mkdir()
    for name in ("config.json", "part.safetensors"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "needs_more.py").write_text("import a_library_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    for module in (engine_choice, packaged_models):  # whatever is installed here
        monkeypatch.setattr(module, "package_directory", lambda package: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("guide_engine", "needs_more"):
        sys.modules.pop(name, None)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that an error of use is."""
    try:
        status = main(argv)
    except SystemExit as leaving:
        status = int(str(leaving.code))
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.count("\n") == 1, said.err
    return said.err.rstrip("\n")


@each_case(
    ("argv", "words"),
    [
        ([], "no command given; use one of serve, models, chat, new, conformance"),
        (["serv"], "there is no command 'serv'"),
        (
            ["serve", "--engine", "nope"],
            "there is no engine 'nope'; use one of llamacpp, llamacpp-text, reference, sample, sglang, transformers, trtllm, upstream, vllm, or module:Class, module:function",
        ),
        (["serve", "--engine", "a b:C"], "there is no engine 'a b:C'"),
        (["serve", "--workers", "0"], "--workers: 0 is out of range: use 1 to 256 (see dynamo serve --help)"),
        (
            ["serve", "--workers", "many"],
            "--workers: 'many' is neither an integer from 1 to 256 nor a range of them (1..4) (see dynamo serve --help)",
        ),
        (["serve", "--http-port", "65536"], "--http-port: 65536 is not a port: use 0..65535"),
        (["serve", "--http-host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (["serve", "--workers", "0..0"], "--workers: 0..0 is out of range: use 0 to 256"),
        (["serve", "--workers", "4..1"], "--workers: 4..1 has the larger number first: write 1..4"),
        (["serve", "--workers", "1..4", "--in-process"], "--workers 1..4 adds and removes processes"),
        (["serve", "--scale-advise"], "--scale-advise needs a range of workers: --workers MIN..MAX, not 1"),
        (["serve", "--frontend-workers", "65"], "--frontend-workers: 65 is out of range: use 1 to 64"),
        (["serve", "--in-process", "--frontend-workers", "2"], "--frontend-workers has no meaning with --in-process"),
        (["serve", "--in-process", "--store", "x"], "--store has no meaning with --in-process"),
        (["serve", "--http-port", "0", "--store", "guide_engine.py"], "--store guide_engine.py: File exists"),
        (["serve", "--", "--discovery-backend", "etcd"], "--discovery-backend etcd needs more than this machine"),
        (["serve", "--", "--event-plane=nats"], "--event-plane nats needs more than this machine"),
        (["serve", "a", "b"], "there is no directory, file or short name a"),
        (
            ["serve", "m", "--max-model-len", "9"],
            "unrecognized arguments: --max-model-len 9; a flag of the engine goes behind two dashes: dynamo serve MODEL "
            "-- --max-model-len ...",
        ),
        (["serve", "--prot", "9"], "unrecognized arguments: --prot; did you mean --port?"),
        (["serve", "--api-key", "x"], "keys are in a file here: --keys FILE, made by dynamo keys create"),
        (
            ["serve", "--model", "a/b"],
            "--model is for --upstream URL; a model that runs here has no flag: dynamo serve a/b",
        ),
        (
            ["serve", "empty"],
            "empty has neither config.json nor a GGUF file; serve a directory in the HuggingFace layout",
        ),
        (["serve", "--wokers", "2"], "unrecognized arguments: --wokers; did you mean --workers?"),
        (["serve", "--engine", "refrence"], "there is no engine 'refrence'; did you mean reference?"),
        (["serve", "--engine", "nothing_here.py:answer"], "there is no file nothing_here.py"),
        (["srve"], "there is no command 'srve'; did you mean serve?"),
        (
            ["serve", "test-model"],
            "there is no directory, file or short name test-model (dynamo models lists the short names); dynamo serve hub:test-model fetches",
        ),
        (["serve", "smolm2"], "short name smolm2; did you mean smollm2? (dynamo models lists the short names)"),
        (
            ["serve", "Qwen/Qwen3"],
            "Qwen/Qwen3 is not on this machine; dynamo serve hub:Qwen/Qwen3 fetches it from the hub",
        ),
        (["serve", "none.gguf"], "error: there is no file or directory none.gguf"),
        (["serve", "/nowhere/at/all"], "there is no file or directory /nowhere/at/all, nor its folder /nowhere/at"),
        (["serve", "./m"], "error: there is no file or directory ./m"),
        (["serve", "http://h:1/v1"], "http://h:1/v1 is an address: dynamo serve --upstream http://h:1/v1 --model NAME"),
        (["serve", "m.gguf"], "m.gguf is named like a GGUF file, and is not one"),
        (["serve", "gguf-in-disguise"], "gguf-in-disguise is a GGUF file, for which llama.cpp is needed: pip install"),
        (["serve", "alone.safetensors"], "is a file of weights (safetensors); the engine needs all of the model"),
        (["serve", "model/part.safetensors"], "(safetensors); serve its directory: dynamo serve "),
        (["serve", "model/config.json"], "config.json is one file of a model; serve its directory: dynamo serve "),
        (["serve", "m.pth"], "m.pth is a file of PyTorch weights"),
        (["serve", "m.tar.gz"], "m.tar.gz is an archive; unpack it"),
        (
            ["serve", "guide_engine.py"],
            "is a Python file; to serve a function or an engine of it, use --engine guide_engine.py:NAME",
        ),
        (["serve", "notes.txt"], "notes.txt is not a model; serve a directory in the HuggingFace layout"),
        (["conformance", "nope:Engine"], "there is no module 'nope'"),
        (["conformance", "localhost:8000/v1"], "is no address of a server: that begins with http:// or https://"),
        (["conformance", "ftp://localhost/v1"], "is no address of a server: that begins with http:// or https://"),
        (["conformance", "guide_engine.sub:Engine"], "there is no module 'guide_engine.sub'"),
        (["conformance", "needs_more:Engine"], "module 'needs_more' needs 'a_library_nobody_has'"),
        (["conformance", "guide_engine:Missing"], "has no 'Missing'; it has GuideEngine"),
        (
            ["conformance", "guide_engine:not_an_engine"],
            "is neither a subclass of LLMEngine or RawEngine nor a function",
        ),
        (["conformance", "guide_engine:argparse"], "is neither a subclass of LLMEngine or RawEngine nor a function"),
        (["conformance", "dynamo.contract.engine:LLMEngine"], "LLMEngine is abstract: it does not implement"),
        (
            ["conformance", "dynamo.engines.sample.diffusion_engine:SampleDiffusionEngine", "--encode"],
            "a raw engine has no encode role",
        ),
        (["new", "my backend"], "'my backend' cannot be a package's name"),
        (["new"], "the following arguments are required: NAME"),
    ],
)
def test_an_error_of_use_is_one_line_and_status_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *argv)


def test_a_client_certificate_that_the_command_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_TLS_CLIENT_CA_CERT_PATH", "ca.pem")
    assert "DYN_TLS_CLIENT_CA_CERT_PATH" in refused(capsys, "serve", "--http-port", "0")


def test_a_taken_port_is_the_frontends_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, "serve", "--http-host", "127.0.0.1", "--http-port", str(port))
    assert said == str(PortInUse(port))


def test_a_port_of_the_status_server_cannot_be_shared_by_workers_of_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", "9999")
    said = refused(capsys, "serve", "--in-process", "--workers", "2", "--http-port", "0")
    assert "DYN_SYSTEM_PORT=9999 is one port for 2 workers" in said


def test_the_version_is_printed_with_the_wire_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    native = native_version.partition("+")[0]
    assert capsys.readouterr().out == f"dynamo {__version__} (wire: mux {VERSION}, native {native})\n"


@each_case("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"example:\n  dynamo {command} " in capsys.readouterr().out


def test_a_built_in_engine_says_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dynamo.reference")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"needs 'numpy'.*pip install 'numpy"):
        load_engine("reference")


# -- conformance --------------------------------------------------------------------------------------------------------

BROKEN = """
from dynamo.common.backend import EngineConfig, LLMEngine

class Broken(LLMEngine):
    @classmethod
    async def from_args(cls, argv=None):
        raise AssertionError("the class needs no arguments")
    async def start(self, worker_id):
        return EngineConfig(model="m")
    async def generate(self, request, context):
        yield {"token_ids": [1], "index": 0}
    async def cleanup(self):
        pass
"""


def test_an_engine_that_keeps_the_contract_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "sample", "--", "--delay", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok  start succeeds"
    assert lines[-1] == f"SampleLLMEngine keeps the contract ({len(lines) - 1} checks)"


def test_a_raw_engine_and_an_encoder_are_judged_by_their_own_kits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "dynamo.engines.sample.diffusion_engine:SampleDiffusionEngine"]) == 0
    assert "ok  the config is a raw engine's" in capsys.readouterr().out
    assert main(["conformance", "sample", "--encode", "--", "--disaggregation-mode", "encode", "--delay", "0"]) == 0
    assert "ok  one encode request is served" in capsys.readouterr().out


def test_a_broken_promise_is_named_and_ends_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken_engine.py").write_text(BROKEN)
    assert main(["conformance", "broken_engine:Broken"]) == 1
    said = capsys.readouterr()
    assert said.err == "NoTerminalChunk: the last chunk must have a finish_reason\n"
    assert "ok  metrics set-up is stable" in said.out
    sys.modules.pop("broken_engine")


def test_a_connection_of_a_command_that_breaks_is_no_reader_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(argv: Sequence[str]) -> int:
        raise BrokenPipeError("the server left")

    monkeypatch.setattr("dynamo.cli.packaged_models.main", breaks)
    with pytest.raises(BrokenPipeError, match="the server left"):
        main(["models"])

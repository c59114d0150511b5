"""Programs that end by themselves: errors of use, helpers and logs of the guide, output that nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo.cli.main import main as dynamo
from dynamo.common import model_fetch
from dynamo.errors import CannotConnect
from support.cases import each_case
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS


def test_an_error_of_use_of_the_sample_command_is_one_line_and_exit_2() -> None:
    command = [sys.executable, "-m", "dynamo.common.backend.sample_main", "--request-plane", "pigeon"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--request-plane" in done.stderr


async def test_a_model_is_fetched_in_a_process_that_ends(tmp_path: Path) -> None:
    assert await model_fetch.fetch_model_in_subprocess(str(tmp_path)) == str(tmp_path)
    assert await model_fetch.fetch_model(str(tmp_path), ignore_weights=True) == str(tmp_path)
    assert [model_fetch.needs_local_model_path(name) for name in ("ngc://a/b", "a/b")] == [True, False]
    with pytest.raises(CannotConnect, match="NGC is not supported"):
        await model_fetch.fetch_model("ngc://a/b")
    with pytest.raises(RuntimeError, match="ngc://a/b was not fetched: CannotConnect: NGC is not supported"):
        await model_fetch.fetch_model_in_subprocess("ngc://a/b")


def test_a_native_layer_in_a_folder_of_its_own_adds_what_is_not_here(tmp_path: Path) -> None:
    more = (
        "http/url_validator",
        "protocols/image_protocol",
        "storage",
        "configuration/groups/http_args",
        "utils/topology",
        "recv_forward_pass_metrics",
    )
    for name in more:
        file = tmp_path / "dynamo" / "common" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("HERE = True\n")
    for package in ("http", "protocols", "configuration/groups", "configuration", "utils", ""):
        (tmp_path / "dynamo" / "common" / package / "__init__.py").write_text("")
    modules = ["dynamo.common." + name.replace("/", ".") for name in more]
    lines = [f"import sys; sys.path.append({str(tmp_path)!r})"]
    lines += [f"import {module}; assert {module}.HERE" for module in modules]
    lines.append("from dynamo.common.configuration import ArgGroup")  # ours stays in front
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=PATIENCE_SECONDS)


PROGRAM = """
import json, logging, logging.config, os
from dynamo.runtime.logging import configure_logger, configure_{engine}_logging
configure_logger("svc", 7, logging.WARNING)
logging.info("not shown")
logging.warning("shown")
configure_{engine}_logging(logging.INFO)
path = os.environ["{variable}"]
logging.config.dictConfig(json.load(open(path)))
def check_health():
    logging.getLogger("{logger}").debug("healthy")
    logging.getLogger("{logger}").info("hurt")
logging.getLogger("{logger}.deep").debug("detail")
check_health()
print(path)
"""


def run(engine: str, variable: str, logger: str, **env: str) -> tuple[list[str], Path]:
    code = PROGRAM.format(engine=engine, variable=variable, logger=logger)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )  # fmt: skip
    return done.stderr.splitlines(), Path(done.stdout.strip())


def test_an_engine_logs_like_its_worker_and_leaves_no_file() -> None:
    lines, file = run("vllm", "VLLM_LOGGING_CONFIG_PATH", "vllm")
    assert [line.partition("Z ")[2] for line in lines] == [
        " WARN <string>: [svc:7] shown",
        " INFO <string>.check_health: hurt",
    ]
    assert not file.exists()


def test_the_level_of_vllm_is_its_own_variable_and_its_health_checks_are_not_logged() -> None:
    lines, _ = run(
        "vllm", "VLLM_LOGGING_CONFIG_PATH", "vllm", VLLM_LOGGING_LEVEL="DEBUG", DYN_LOGGING_CONSOLE_FORMAT="jsonl"
    )
    records = [json.loads(line) for line in lines[1:]]
    assert [(record["level"], record["message"]) for record in records] == [("DEBUG", "detail"), ("INFO", "hurt")]
    assert records[1]["target"] == "<string>.check_health"


@pytest.mark.parametrize("logger", ["sglang", "gpu_memory_service"])
def test_sglang_and_its_memory_service_log_in_the_same_format(logger: str) -> None:
    lines, _ = run("sglang", "SGLANG_LOGGING_CONFIG_PATH", logger)
    assert lines[1].endswith(" INFO <string>.check_health: hurt")


@each_case(
    "version, model, named",
    [
        ("0.19.1", str(FILES), "vLLM 0.19.1 is installed; dynamo.vllm works with vLLM 0.20 to 0.33"),
        ("0.32.0", "./no-such-model", "--model ./no-such-model: there is no such directory"),
    ],
)
def test_the_command_ends_with_one_line_and_the_status_2(tmp_path: Path, version: str, model: str, named: str) -> None:
    package = tmp_path / f"packages-{version}" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "dynamo.vllm", "--model", model],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr.strip().splitlines()[-1:]) == (2, [f"InvalidArgument: {named}"])
    assert len(ended.stderr.splitlines()) == 1


@each_case("argv", [["--help"], ["models"], ["completion", "bash"]])
def test_a_reader_that_leaves_ends_a_command_without_a_word(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "dynamo.cli.main", *argv], stdout=writing, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.json", "two.json")]
    few = [
        "size",
        "--ttft",
        "400",
        "--rate",
        "40",
        "--input-tokens",
        "1000",
        "--output-tokens",
        "20",
        "--requests",
        "30",
        "--max-replicas",
        "2",
        "--no-split",
    ]
    for jobs, file in zip(("1", "2"), files, strict=True):
        assert dynamo([*few, "--jobs", jobs, "--json", str(file)]) == 0
    assert files[0].read_text() == files[1].read_text()


UVLOOP = """
import asyncio, sys
import uvloop
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.mux import MuxClient
from support.native_caller import native_caller
from test_listener import PATH, listening, mux_tokens

async def main():
    async with listening() as listener, native_caller(listener.address) as caller:
        client = MuxClient()
        assert await mux_tokens(client, listener, 3) == [0, 1, 2]
        for _ in range(3):
            assert (await (await caller.call(PATH, {"n": 2})).everything())[-1] == "sentinel"
        await client.close()
    print("served")

uvloop.run(main())
"""


def test_both_wires_work_on_uvloop_too() -> None:
    pytest.importorskip("uvloop")
    tests = Path(__file__).parents[2]
    program = f"import sys; sys.path[:0] = {[str(tests / 'unit' / 'runtime'), str(tests)]!r}\n" + UVLOOP
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (found.stdout, found.returncode) == ("served\n", 0), found.stderr

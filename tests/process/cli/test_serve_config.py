"""`dynamo serve --config FILE` and `--reload`: what a file may say, and what is seen of a change."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from dynamo.cli.local import changed_files, source_times
from dynamo.cli.local_processes import programs
from dynamo.cli.serve import ServeOptions, read_options
from dynamo.cli.usage import UsageError
from support.serve_command import serve_command


def written(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    return ["--config", str(path)]


def test_a_file_gives_the_options_the_flags_of_the_frontend_and_those_of_the_engine(tmp_path: Path) -> None:
    argv = written(
        tmp_path,
        'engine = "sample"\nworkers = 3\nport = 9001\nhost = "::1"\n'
        '[frontend-args]\nrouter-mode = "random"\nmax_requests_in_flight = 7\nignore-unsupported-fields = true\n'
        '[engine-args]\nmodel-name = "m"\ndelay = 0.5\nlist = ["a", "b"]\n',
    )
    options = read_options(argv, {})
    assert (options.engine, str(options.flags.workers), options.flags.http_port, options.flags.http_host) == (
        "sample",
        "3",
        9001,
        "::1",
    )
    assert options.frontend_args == (
        *("--router-mode", "random", "--max-requests-in-flight", "7", "--ignore-unsupported-fields"),
    )
    assert options.engine_args == ("--model-name", "m", "--delay", "0.5", "--list", "a", "--list", "b")


def test_a_file_may_leave_out_the_port_and_name_a_socket_and_a_prefix(tmp_path: Path) -> None:
    flags = read_options(written(tmp_path, 'port = "off"\nuds = "a.sock"\nroot-path = "/llm/"\n'), {}).flags
    assert (flags.http_port, flags.uds, flags.root_path) == (None, "a.sock", "/llm")


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    argv = written(tmp_path, 'engine = "sample"\nworkers = 3\nport = 9001\n')
    env = {"DYN_HTTP_PORT": "7000", "DYN_HTTP_HOST": "127.0.0.9"}
    options = read_options([*argv, "--workers", "5"], env)
    assert (str(options.flags.workers), options.flags.http_port, options.flags.http_host) == ("5", 9001, "127.0.0.9")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker = 2", "there is no option 'worker'; did you mean workers?"),
        ("workers = [1]", "workers must be a single value"),
        ("workers = true", "workers must be a value, not true or false"),
        ('workers = "many"', "workers: 'many' is neither an integer from 1 to 256"),
        ("in-process = 1", "in-process must be true or false"),
        ('router-mode = "kindest"', "router-mode: 'kindest' is unknown; use one of round-robin"),
        ("frontend-args = 3", "frontend-args must be a table: write [frontend-args]"),
        ("[engine-args]\nflag = false", "[engine-args] flag must be a text, a number, true, or a list of these"),
        ("[engine-args", "is not valid TOML"),
        ('port = "of"', "port: 'of' is neither off nor an integer from 0 to 65535"),
        ('port = "off"', "--http-port off leaves no way to the API: add --uds PATH"),
        ('root-path = "llm"', "root-path: 'llm' is not the prefix of a path; write for example /llm"),
        ('[frontend-args]\nuds = "a"', "[frontend-args] uds: write it as an option, above the tables"),
        ("workers = 0", "workers: 0 is out of range: use 1 to 256"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read_options(written(tmp_path, text), {})
    assert words in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.toml cannot be read: No such file"):
        read_options(["--config", str(tmp_path / "nothing.toml")], {})


def test_only_this_machine_can_connect_unless_a_host_is_named() -> None:
    assert read_options([], {}).flags.http_host == "127.0.0.1"
    assert read_options(["--host", "0.0.0.0"], {}).flags.http_host == "0.0.0.0"


# -- another server --------------------------------------------------------------------------------------------------------


def close(options: ServeOptions) -> None:
    """Close the sockets to a frontend that is not started."""
    assert isinstance(options.residents, partial)
    for end in options.residents.args[0]:
        end.close()


BESIDE = ("--upstream", "http://x/v1", "--model", "big=theirs")


def test_another_server_is_served_alone_or_beside_a_model(tmp_path: Path) -> None:
    alone = read_options([*BESIDE], {})
    assert (alone.engine, alone.engine_args, alone.upstream_args) == ("upstream", BESIDE, ())
    for local in (["demo"], ["--engine", "sample"]):
        beside = read_options([*local, *BESIDE, "--fallback", "m=big", "--fallback-on", "failed", "--", "--own"], {})
        assert beside.engine in ("reference", "sample")
        assert (beside.engine_args[-1], beside.upstream_args) == ("--own", BESIDE)
        assert beside.frontend_args == ("--fallback-on", "failed", "--fallback", "m=big")
    argv = ["--engine", "sample", "--workers", "2", "--served-model-name", "mine", *BESIDE]
    started = programs(read_options(argv, {}), [3], tmp_path, {})
    assert [program.name for program in started] == ["frontend", "worker-1", "worker-2", "upstream"]
    assert ["--serve-as=mine" in program.argv for program in started] == [False, True, True, False]


def test_a_file_names_the_models_of_another_server_and_those_of_this_machine(tmp_path: Path) -> None:
    text = (
        'upstream = "http://x/v1"\nmodel = ["big=theirs", "small"]\nfallback = ["m=big", "n=small"]\n'
        "[upstream-args]\nupstream-retries = 0\n"
    )
    alone = read_options(written(tmp_path, text), {})
    theirs = (*BESIDE, "--model", "small", "--upstream-retries", "0")
    assert (alone.engine, alone.engine_args) == ("upstream", theirs)
    assert alone.frontend_args == ("--fallback", "m=big", "--fallback", "n=small")
    tables = '[models.m]\nmodel = "x"\nengine = "sample"\n[models.n]\nmodel = "y"\nengine = "sample"\n'
    many = read_options(written(tmp_path, text + tables), {})
    assert (set(many.many), many.upstream_args) == ({"m", "n"}, theirs)
    close(many)
    several = read_options(written(tmp_path, 'model = ["x", "y"]\nengine = "sample"\npin = ["x", "y"]\n'), {})
    assert (set(several.many), several.flags.pin) == ({"x", "y"}, ("x", "y"))
    close(several)
    again = read_options(["x", "y", "--engine", "sample", "--pin", "x", "--pin", "y"], {})
    assert again.flags.pin == ("x", "y")
    close(again)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["demo", "--model", "big=theirs"], "--model is for --upstream URL"),
        (["demo", *BESIDE, "--in-process"], "is a process of its own, and --in-process has one"),
        (["demo", "--fallback", "demo=big", "--in-process"], "--fallback"),
        (["a", "b", "--engine", "sample", "--upstream", "http://x/v1", "--model", "a"], "--model a: a model or preset of this"),
        (["a", "b", "--engine", "sample", *BESIDE, "--fallback", "a=bog"], "there is no model bog; did you mean big?"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_together_is_named(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read_options(argv, {})
    assert words in str(refusal.value)


# -- reload ---------------------------------------------------------------------------------------------------------------


def test_changes_of_python_files_are_seen_and_nothing_else(tmp_path: Path) -> None:
    for name in ("app.py", "lib/part.py", "notes.txt", ".git/hook.py", "env/pyvenv.cfg", "env/deep.py", "dist/old.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    before = source_times(tmp_path)
    assert sorted(before) == ["app.py", "lib/part.py"]
    os.utime(tmp_path / "app.py", ns=(1, 1))
    (tmp_path / "lib/part.py").unlink()
    (tmp_path / "new.py").write_text("")
    assert changed_files(before, source_times(tmp_path)) == ["app.py", "lib/part.py", "new.py"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--reload"], "reference comes with this package"),
        (["--engine", "app:answer", "--reload", "--in-process"], "--in-process has none"),
    ],
)
def test_reload_without_anything_to_watch_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_options(argv, {})


SHOUT = """
async def shout(messages):
    for word in messages[-1]["content"].split():
        yield word.{how}() + " "
"""


@pytest.mark.timeout(180)
def test_a_written_file_replaces_every_worker(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SHOUT.format(how="upper"))
    here = ("--engine", "app.py:shout", "--reload", "--workers", "2", "--host", "127.0.0.1", "--port", "0")
    with serve_command(tmp_path, *here) as command:
        command.patience = 120.0
        command.wait_ready()
        assert command.out.count("serves dynamo.backend.generate") == 2  # Ready means: all workers that were asked for
        assert command.ask("shout") == "HI "
        # As long as the first version and of the same second: Python's bytecode files cannot tell the two apart.
        written_at = (tmp_path / "app.py").stat().st_mtime_ns
        (tmp_path / "app.py").write_text(SHOUT.format(how="lower"))
        os.utime(tmp_path / "app.py", ns=(written_at, written_at // 10**9 * 10**9 + 900_000_000))
        command.wait_for(lambda: "all 2 workers were replaced" in command.out, "the new version")
        assert command.ask("shout") == "hi "
        assert "app.py changed: replacing worker-1, worker-2" in command.out

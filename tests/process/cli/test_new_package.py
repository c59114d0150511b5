from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest

import dynamo
from dynamo.cli.installation import Installation, pip_arguments
from dynamo.cli.main import main
from dynamo.cli.new import Names
from dynamo.cli.usage import UsageError
from support.doc_pages import READ

CHECKOUT = Path(__file__).parents[3]
FRESH = pytest.mark.skipif("FRESH" not in os.environ, reason="make test-fresh")


def printed_steps(output: str) -> list[str]:
    """Take the commands that `dynamo new` prints: the indented lines after "Next:"."""
    after = output.partition("\nNext:\n")[2].splitlines()
    return [line.removeprefix("  ") for line in itertools.takewhile(lambda line: line.startswith("  "), after)]


def outside(home: Path) -> dict[str, str]:
    """An environment without this one: its Python's folder first, none of its packages, pip's own settings kept."""
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "HTTP", "NO_PROXY"))}
    base = Path(sys.base_prefix) / "bin"
    return kept | {"PATH": f"{base}:/usr/bin:/bin", "HOME": str(home), "DYN_FILE_KV": str(home / "store")}


def bash(script: str, env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


@FRESH
@pytest.mark.fresh
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("editable", ["-e ", ""])
def test_the_printed_steps_work_as_printed_in_a_fresh_environment(editable: str, tmp_path: Path) -> None:
    env = outside(tmp_path)
    bash(f"python3 -m venv first && first/bin/pip install {editable}{CHECKOUT}", env, tmp_path)
    *steps, serve = printed_steps(bash("first/bin/dynamo new my-backend", env, tmp_path))
    assert serve == "dynamo serve my-model --engine my_backend.engine:MyEngine"
    tested = bash("\n".join(steps), env, tmp_path)
    assert "5 passed" in tested
    assert "ai-dynamo" not in tested
    with socket.socket() as probe:  # 8000 may be taken on the machine of a test
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `exec`, so that the server is the process that gets the signal.
    script = f"cd my-backend\n. .venv/bin/activate\nexec {serve} --http-port {port}"
    server = subprocess.Popen(["bash", "-euc", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert any("Ready" in line for line in server.stdout), "the server ended before it was ready"
        body = {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@FRESH
@pytest.mark.fresh
@pytest.mark.timeout(900)
def test_a_package_of_the_guide_installs_through_the_stand_in(tmp_path: Path) -> None:
    assert main(["new", "guide-backend", "--dir", str(tmp_path)]) == 0
    project = tmp_path / "guide-backend" / "pyproject.toml"
    ours = f'"dynamo-unified>={dynamo.__version__}"'
    assert ours in project.read_text()
    project.write_text(project.read_text().replace(ours, '"ai-dynamo>=1.2.0"'))
    (order,) = [block.text for block in READ["writing-a-backend.md"].blocks if "./shim" in block.text]
    assert '"my-backend[dev]"' in order  # a path, as the page says
    script = order.replace("my-backend[dev]", f"{tmp_path}/guide-backend[dev]")
    told = bash(
        f"python3 -m venv {tmp_path}/venv\n. {tmp_path}/venv/bin/activate\n{script}"
        f"pip list\ncd {tmp_path}/guide-backend\npytest -q",
        outside(tmp_path),
        CHECKOUT,
    )
    assert re.search(r"^ai-dynamo +1\.6\.1\+unified", told, re.MULTILINE)
    assert "ai-dynamo-runtime" not in told
    assert "5 passed" in told


@pytest.mark.parametrize(
    ("origin", "arguments"),
    [
        ({"url": "file:///a/b%20c", "dir_info": {"editable": True}}, "-e '/a/b c'"),
        ({"url": "file:///a/b", "dir_info": {}}, "/a/b"),
        ({"url": "file:///a/dynamo_unified-1.whl", "archive_info": {}}, "/a/dynamo_unified-1.whl"),
        ({"url": "https://h/d.whl", "archive_info": {}}, "'dynamo-unified @ https://h/d.whl'"),
        (
            {"url": "https://h/d.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'dynamo-unified @ git+https://h/d.git@abc'",
        ),
    ],
)
def test_pip_installs_again_what_was_installed_from_a_place(origin: dict[str, object], arguments: str) -> None:
    assert pip_arguments(origin) == arguments


def test_without_metadata_the_checkout_is_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert Installation.find() == Installation(dynamo.__version__, f"-e {CHECKOUT}")


def test_a_fresh_package_passes_its_own_tests_and_the_kit(tmp_path: Path) -> None:
    assert main(["new", "my-backend", "--dir", str(tmp_path)]) == 0
    root = tmp_path / "my-backend"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "5 passed" in run.stdout
    kit = subprocess.run(
        [sys.executable, "-m", "dynamo.cli.main", "conformance", "my_backend.engine:MyEngine"],
        cwd=root / "src",
        capture_output=True,
        text=True,
        check=False,
    )
    assert kit.returncode == 0, kit.stdout + kit.stderr


def test_a_fresh_package_is_what_pip_and_its_command_expect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "my-backend", "--dir", str(tmp_path)])
    root = tmp_path / "my-backend"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-backend"
    assert project["project"]["dependencies"] == [f"dynamo-unified>={dynamo.__version__}"]
    assert project["project"]["scripts"] == {"my-backend": "my_backend.main:main"}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/my_backend"]
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == [
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/my_backend/__init__.py",
        "src/my_backend/engine.py",
        "src/my_backend/main.py",
        "tests/test_engine.py",
    ]
    assert not [path for path in root.rglob("*") if path.is_file() and "@@" in path.read_text()]
    steps = printed_steps(capsys.readouterr().out)
    assert steps[0] == f"cd {root}"
    assert f'pip install -e {CHECKOUT} -e ".[dev]"' in steps
    assert f'pip install -e {CHECKOUT} -e ".[dev]"' in (root / "README.md").read_text().splitlines()


def test_what_exists_is_overwritten_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-backend" / "src").mkdir(parents=True)
    kept = tmp_path / "my-backend" / "notes.txt"
    kept.write_text("mine")
    assert main(["new", "my-backend", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["new", "my-backend", "--dir", str(tmp_path), "--force"]) == 0
    assert kept.read_text() == "mine"
    assert (tmp_path / "my-backend" / "pyproject.toml").is_file()


def test_a_place_that_cannot_be_written_is_an_error_of_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new", "my-backend", "--dir", str(tmp_path / "file")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "module", "engine"),
    [
        ("my-backend", "my_backend", "MyEngine"),
        ("acme", "acme", "AcmeEngine"),
        ("Acme.Fast_LLM", "acme_fast_llm", "AcmeFastLlmEngine"),
        ("tiny-engine", "tiny_engine", "TinyEngine"),
        ("backend", "backend", "BackendEngine"),
        ("x2", "x2", "X2Engine"),
    ],
)
def test_a_name_has_three_spellings(name: str, module: str, engine: str) -> None:
    assert Names.of(name) == Names(name, module, engine)


@pytest.mark.parametrize(
    "name",
    ["", "-x", "x-", "x--y", "2x", "../x", "a/b", "ümlaut", "x" * 65, "class", "json", "Dynamo", "asyncio", "a b"],
)
def test_a_name_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Names.of(name)

"""`dynamo keys`: what each command leaves in the file, and what it prints."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest

from dynamo.cli import keys
from dynamo.cli.main import main
from dynamo.cli.usage import UsageError
from dynamo.frontend.base.access import KeyRole
from dynamo.frontend.parts.keys.key_store import change_key_file, load_key_file
from dynamo.frontend.parts.keys.rules.key_text import hash_of
from dynamo.frontend.parts.keys.rules.records import Budget, LimitSet, Period, Revocation


@pytest.fixture(params=["keys.toml", "keys.json"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DYN_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / str(request.param)


def run(path: Path, *argv: str) -> int:
    return keys.main([*argv, "--file", str(path)])


def create(path: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """The key that was printed, and its id."""
    assert run(path, "create", *argv) == 0
    printed = capsys.readouterr().out.strip()
    return printed, printed.removeprefix("dyn-").partition(".")[0]


def test_a_key_is_printed_once_and_its_hash_is_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, id = create(path, capsys, "--name", "alice", "--model", "llama-*", "--expires", "30d", "--admin")
    record = load_key_file(str(path)).find(id)
    assert record is not None
    assert (record.hash, record.name, record.models, record.role) == (
        hash_of(key.encode()),
        "alice",
        ("llama-*",),
        "admin",
    )
    assert key not in path.read_text()
    assert key.partition(".")[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    run(path, "list")
    assert id in capsys.readouterr().out


def test_flags_for_limits_and_budgets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--rpm",
        "60",
        "--tpm",
        "1000",
        "--concurrent",
        "3",
        "--max-tokens",
        "5",
        "--budget-tokens",
        "10",
        "--hard",
    ]
    _, id = create(path, capsys, *flags)
    record = load_key_file(str(path)).find(id)
    assert record is not None
    assert record.limits == LimitSet(requests_per_minute=60, tokens_per_minute=1000, concurrent=3)
    assert record.budget == Budget(period=Period.MONTH, tokens=10, hard=True)
    assert record.max_tokens == 5
    for wrong, words in ((["--hard"], "--budget-tokens"), (["--rpm", "0"], ">= 1"), (["--budget-money", "-1"], "> 0")):
        assert main(["keys", "create", *wrong, "--file", str(path)]) == 2
        assert words in capsys.readouterr().err


def test_disable_enable_rotate_and_delete(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, id = create(path, capsys)
    _, other = create(path, capsys)
    run(path, "disable", id)
    assert [record.enabled for record in load_key_file(str(path)).keys] == [False, True]
    run(path, "enable", id)
    capsys.readouterr()
    run(path, "rotate", id, "--keep", "24h")
    new = capsys.readouterr().out.strip()
    record = load_key_file(str(path)).find(id)
    assert record is not None
    assert record.enabled
    assert (record.hash, record.previous_hash) == (hash_of(new.encode()), hash_of(old.encode()))
    run(path, "rotate", id)
    record = load_key_file(str(path)).find(id)
    assert record is not None
    assert record.previous_hash is None
    capsys.readouterr()
    run(path, "show", id)
    assert json.loads(capsys.readouterr().out)["id"] == id
    run(path, "delete", id)
    run(path, "delete", other)
    assert load_key_file(str(path)).keys == ()


def test_a_key_is_revoked_with_its_requests(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, id = create(path, capsys)
    run(path, "revoke", id)
    record = load_key_file(str(path)).find(id)
    assert record is not None
    assert (record.enabled, record.revoke) == (False, Revocation.NOW)
    assert "within two seconds" in capsys.readouterr().err


def test_a_key_has_the_role_that_was_asked_for(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for role in KeyRole:
        _, id = create(path, capsys, "--role", role)
        record = load_key_file(str(path)).find(id)
        assert record is not None
        assert record.role is role
    assert main(["keys", "create", "--role", "viewer", "--admin", "--file", str(path)]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_key_of_an_older_gateway_is_imported(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-0123456789abcdef\n"))
    assert create(path, capsys, "--import") == ("", "")
    assert load_key_file(str(path)).keys[0].hash == hash_of(b"sk-0123456789abcdef")
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-short\n"))
    with pytest.raises(UsageError, match="16 to 512 bytes"):
        run(path, "create", "--import")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "nobody"], "no key with the id 'nobody'"),
        (["disable", "nobody"], "no key with the id 'nobody'"),
        (["delete", "nobody"], "'nobody'"),
        (["create", "--cidr", "10.0.0.300/8"], "10.0.0.300/8"),
        (["create", "--name", ""], "name"),
    ],
)
def test_errors_of_use_are_one_line(
    path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    create(path, capsys)
    before = path.read_bytes()
    assert main(["keys", *argv, "--file", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "show", "delete"):
        assert main(["keys", command, *([] if command == "list" else ["x"]), "--file", str(tmp_path / "no.toml")]) == 2
        assert "no.toml" in capsys.readouterr().err


def test_commands_at_once_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")

    def add() -> None:
        for _ in range(25):
            change_key_file(str(path), lambda text: str(int(text) + 1))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "200"


def test_a_link_stays_a_link_and_a_failed_change_leaves_the_file(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "link"
    target.write_text("a")
    link.symlink_to(target)
    change_key_file(str(link), lambda text: text + "b")
    assert link.is_symlink()
    assert target.read_text() == "ab"

    def broken(text: str) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_key_file(str(link), broken)
    assert target.read_text() == "ab"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "real", "real.lock"]

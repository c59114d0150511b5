"""Whose directory the file store is, and how many files a process may open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.errors import CannotConnect
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.discovery.file.discovery import FileStore


def owned_by(monkeypatch: pytest.MonkeyPatch, path: Path, uid: int, mode: int = 0o40700) -> None:
    """Let a path look as if another user had made it."""
    for name in ("stat", "lstat"):
        real = getattr(Path, name)

        def looked(self: Path, *given: Any, _real: Any = real, **named: Any) -> Any:
            found = _real(self, *given, **named)
            return SimpleNamespace(st_uid=uid, st_mode=mode) if self == path else found

        monkeypatch.setattr(Path, name, looked)


def test_a_store_that_another_user_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    root.mkdir()
    with monkeypatch.context() as patched:
        owned_by(patched, root, os.geteuid() + 4711)
        with pytest.raises(CannotConnect, match="belongs to another user") as refused:
            FileStore(root, ttl_seconds=10.0).open()
        assert "DYN_FILE_KV" in str(refused.value)


def test_a_store_that_every_user_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    owned_by(monkeypatch, root, 4711, 0o40777)
    with pytest.raises(CannotConnect, match="chmod 700"):
        FileStore(root, ttl_seconds=10.0).open()


def test_a_new_store_is_for_its_user_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", ttl_seconds=10.0)
    store.open()
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_the_default_is_a_directory_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"TMPDIR": str(tmp_path)}
    shared = tmp_path / "dynamo_store_kv"
    assert RuntimeSettings.from_env(env).file_root == shared
    shared.mkdir()
    assert RuntimeSettings.from_env(env).file_root == shared
    owned_by(monkeypatch, shared, os.geteuid() + 4711)
    assert RuntimeSettings.from_env(env).file_root == tmp_path / f"dynamo_store_kv-{os.geteuid()}"


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource; from dynamo.runtime.base.limits import within_descriptors\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "within_descriptors(100, spare=10); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == hard

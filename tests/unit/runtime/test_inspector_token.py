"""The file of the inspector's token: for its owner only, found by port, gone with its frontend."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from dynamo.runtime.http.inspector_token import (
    InspectorAccess,
    find_access,
    new_token,
    publish_access,
    remove_access,
    token_directory,
)


def test_what_is_published_is_found_by_port_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    access = InspectorAccess("http://127.0.0.1:8000", new_token(), os.getpid())
    path = publish_access(8000, access, env)
    assert path == tmp_path / "dynamo" / "inspect-8000.json"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    found = find_access(8000, env)
    assert found is not None
    assert found == msgspec.structs.replace(access, host=socket.gethostname(), pid_namespace=found.pid_namespace)
    assert found.is_of_here
    assert find_access(8001, env) is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_without_a_runtime_folder_it_is_below_the_cache_of_the_user() -> None:
    assert token_directory({"HOME": "/home/x"}) == Path("/home/x/.cache/dynamo/run")


def test_a_frontend_removes_its_own_file_and_not_that_of_the_next_one(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    old, new = (InspectorAccess("http://127.0.0.1:8000", new_token(), os.getpid()) for _ in range(2))
    publish_access(8000, old, env)
    publish_access(8000, new, env)
    remove_access(8000, old.token, env)
    found = find_access(8000, env)
    assert found is not None
    assert found.token == new.token
    for _ in range(2):
        remove_access(8000, new.token, env)
    assert find_access(8000, env) is None


def test_a_file_that_others_could_have_written_is_not_believed(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    path = publish_access(8000, InspectorAccess("http://127.0.0.1:8000", new_token(), 1), env)
    path.chmod(0o640)
    assert find_access(8000, env) is None
    path.chmod(0o600)
    real = path.with_name("real.json")
    path.rename(real)
    path.symlink_to(real)
    assert find_access(8000, env) is None
    path.unlink()
    path.write_bytes(b"\xff{")
    path.chmod(0o600)
    assert find_access(8000, env) is None


def test_the_files_of_killed_frontends_of_this_machine_are_removed_at_a_start(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = InspectorAccess("http://127.0.0.1:8001", new_token(), int(ended.stdout))
    left = publish_access(8001, dead, env)
    elsewhere = publish_access(8002, dead, env)
    elsewhere.write_bytes(msgspec.json.encode(msgspec.structs.replace(dead, host="another-machine")))
    container = publish_access(8004, dead, env)  # its process has a number of another PID namespace
    found = find_access(8004, env)
    assert found is not None
    container.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, pid_namespace="pid:[1]")))
    strange = left.with_name("inspect-8003.json")
    strange.write_bytes(b"not json")
    mine = publish_access(8000, InspectorAccess("http://127.0.0.1:8000", new_token(), os.getpid()), env)
    assert sorted(left.parent.iterdir()) == [mine, elsewhere, strange, container]

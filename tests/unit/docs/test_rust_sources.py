"""What the sources in Rust promise: no unsafe code, and nothing that came from outside ends the process.

`cargo clippy` holds most of it where there is a cargo; this holds that nobody turned it off.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

RUST = Path(__file__).parents[3] / "rust"
MEMBERS = tomllib.loads((RUST / "Cargo.toml").read_text())["workspace"]["members"]
APART = "dynamo-backend-tls"  # a workspace of its own
CRATES = [*MEMBERS, APART]

GIVES_UP = re.compile(r"\.unwrap\(\)|\.expect\(|\b(?:panic|unreachable|todo|unimplemented|assert)!\(|\bunsafe\b")
SCHEDULER, PLACES = "mocker/src/scheduler/mod.rs", "places are the scheduler's own numbers"
ALLOWED = {
    ("dynamo-backend-common/src/serving.rs", '        panic!("{text}");'): "the validator of debug builds",
    (
        SCHEDULER,
        '        self.requests[place].as_mut().unwrap_or_else(|| unreachable!("place {place} is free"))',
    ): PLACES,
    (
        SCHEDULER,
        '        self.requests[place].as_ref().unwrap_or_else(|| unreachable!("place {place} is free"))',
    ): PLACES,
}
TURNED_OFF = re.compile(r"#!?\[(?:allow|expect)\(([^)]*)\)\]")
ALLOWED_OFF = {("dynamo-backend-common/src/serving.rs", "clippy::panic")}
MAX_LINES = 600


def sources() -> Iterator[tuple[str, str]]:
    """The sources of each crate, and where they are in `rust/`; those of tests are left out."""
    for crate in CRATES:
        for path in sorted((RUST / crate / "src").rglob("*.rs")):
            if path.name not in ("tests.rs", "vectors.rs"):
                text = path.read_text()
                yield path.relative_to(RUST).as_posix(), text.partition("\n#[cfg(test)]\nmod tests {")[0]


def test_nothing_gives_up_outside_tests() -> None:
    found = {
        (place, line)
        for place, text in sources()
        for line in text.splitlines()
        if GIVES_UP.search(line.partition("//")[0])
    }
    assert found == set(ALLOWED)


def test_no_lint_is_turned_off() -> None:
    found = {(place, lint) for place, text in sources() for lint in TURNED_OFF.findall(text)}
    assert found == ALLOWED_OFF


def test_every_crate_has_the_lints_of_the_workspace() -> None:
    lints = tomllib.loads((RUST / "Cargo.toml").read_text())["workspace"]["lints"]
    assert lints == tomllib.loads((RUST / APART / "Cargo.toml").read_text())["lints"]
    assert lints["rust"] == {"unsafe_code": "forbid", "missing_docs": "deny"}
    assert lints["clippy"] == {"unwrap_used": "deny", "expect_used": "deny", "panic": "deny"}
    for crate in MEMBERS:
        assert tomllib.loads((RUST / crate / "Cargo.toml").read_text())["lints"] == {"workspace": True}


def test_every_crate_has_the_version_of_the_workspace() -> None:
    version = tomllib.loads((RUST / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert tomllib.loads((RUST / APART / "Cargo.toml").read_text())["package"]["version"] == version
    page = (RUST.parent / "docs" / "writing-a-backend-in-rust.md").read_text()
    assert page.count(f'name = "dynamo-backend-common"\nversion = "{version}"') == 1


def test_the_readme_of_the_sdk_lists_its_files_and_the_members_of_a_request() -> None:
    crate = RUST / "dynamo-backend-common"
    readme = (crate / "README.md").read_text()
    _, _, listed = readme.partition("\n## Files\n")
    there = {f"{path.name}/" if path.is_dir() else path.name for path in (crate / "src").iterdir()} - {"lib.rs"}
    assert set(re.findall(r"`([a-z_]+(?:\.rs|/))`", listed)) - {"src/"} == there
    schema = (crate / "src" / "schema.rs").read_text()
    for status in ("Supported", "Forwarded"):
        names = re.findall(rf'^    field\("?(\w+)"?, {status},', schema, re.MULTILINE)
        members = {"_HEALTH_CHECK" if name == "HEALTH_CHECK_KEY" else name for name in names}
        row = re.search(rf"^\| `{status.lower()}`: .+$", readme, re.MULTILINE)
        assert row is not None
        assert set(re.findall(r"`(\w+)`", row[0])) - {status.lower()} == members


def test_no_file_is_too_long() -> None:
    assert [place for place, text in sources() if text.count("\n") > MAX_LINES] == []


@pytest.mark.parametrize("line", ["value.unwrap()", 'x.expect("y")', 'panic!("z")', "unsafe { f() }"])
def test_the_search_finds_what_it_should(line: str) -> None:
    assert GIVES_UP.search(line)

"""The hints that name what to install."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from dynamo.settings.extras import install_command
from support.doc_pages import ROOT

REQUIRES = [
    "msgspec>=0.19",
    "nats-py>=2.9; extra == 'nats'",
    'a[x]>=1; sys_platform != "win32" and extra == "two"',
    "b; extra == 'two'",
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    install_command.cache_clear()


def test_the_packages_of_an_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    assert install_command("nats") == "pip install 'nats-py>=2.9'"
    assert install_command("two", "nats") == "pip install 'a[x]>=1' 'b' 'nats-py>=2.9'"
    install_command.cache_clear()


def test_without_metadata_the_extra_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert install_command("nats") == "pip install 'dynamo-unified[nats]'"
    install_command.cache_clear()


def test_no_hint_of_the_source_names_the_distribution() -> None:
    hints = [
        f"{path.name}: {line.strip()}"
        for path in Path(ROOT / "src").rglob("*.py")
        if path.name != "extras.py"
        for line in path.read_text().splitlines()
        if re.search(r"pip install .*dynamo-unified\[", line) and "example" not in line
    ]
    assert hints == []

"""The file of the inspector's token is there exactly while its token is let in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dynamo.frontend.http.inspector_access import published_access
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.http.inspector_token import find_access

PORT = 9000


@dataclass
class Keys:
    protects_admin: bool = False
    on_look: list[Callable[[], None]] = field(default_factory=list)

    def look(self) -> None:
        for looked in self.on_look:
            looked()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FrontendSettings:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return replace(FrontendSettings(), admin_port=PORT)


def test_keys_of_users_alone_leave_the_token_in_force(settings: FrontendSettings) -> None:
    with published_access(settings, 8000, PORT, "t", Keys()):
        found = find_access(PORT)
        assert found is not None
        assert found.token == "t"
    assert find_access(PORT) is None


def test_with_an_admin_key_no_file_sends_tools_to_a_closed_door(settings: FrontendSettings) -> None:
    with published_access(settings, 8000, PORT, "t", Keys(protects_admin=True)):
        assert find_access(PORT) is None


def test_the_file_goes_when_an_admin_key_comes(settings: FrontendSettings) -> None:
    keys = Keys()
    with published_access(settings, 8000, PORT, "t", keys):
        keys.look()
        assert find_access(PORT) is not None
        keys.protects_admin = True
        keys.look()
        assert find_access(PORT) is None
        keys.look()
    assert keys.on_look == []

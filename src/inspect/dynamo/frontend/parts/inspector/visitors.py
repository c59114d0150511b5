"""An authenticated viewer of the inspector, and its permissions."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.frontend.base.access import KeyRole


@dataclass(frozen=True, slots=True)
class Visitor:
    """A key, or the token of a frontend without keys."""

    role: KeyRole
    name: str | None  # of the key; None: the token

    @property
    def shown_name(self) -> str:
        """What an audit line calls it."""
        return self.name or "token"

    def sees_content(self, *, is_shown: bool) -> bool:
        """Return whether prompts and answers are shown to this visitor; `is_shown`: whether the settings allow it."""
        return is_shown and self.role in (KeyRole.CONTENT, KeyRole.ADMIN)

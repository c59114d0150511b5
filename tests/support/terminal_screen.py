"""The live screen of `dynamo top` without a terminal: what it shows as text, and waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from dynamo.cli.inspect.app import InspectorApp
from dynamo.cli.inspect.client import InspectorClient
from support.inspector_server import InspectorServer
from support.patience import PATIENCE_SECONDS

POLL_SECONDS = 0.02


@dataclass
class TerminalScreen:
    """A running app and its keyboard."""

    app: InspectorApp
    pilot: Pilot[Any]

    @property
    def text(self) -> str:
        """What the screen on top shows."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        await self.press(
            *[{" ": "space", ":": "colon", ">": "greater_than_sign", "/": "slash"}.get(c, c) for c in text]
        )

    async def shows(self, *words: str, but: str | None = None) -> str:
        """Wait until all of these can be read, and `but` can't; what is shown then."""
        await self.until(lambda: all(word in self.text for word in words) and (but is None or but not in self.text))
        return self.text

    async def tells(self, words: str) -> None:
        """Wait until a line with these words has been told."""
        await self.until(lambda: any(words in one.message for one in self.app._notifications))

    async def until(self, is_so: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not is_so():
                    await self.pilot.pause(POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(f"waited in vain; the screen shows\n{self.text}") from None


@contextlib.asynccontextmanager
async def terminal_screen(
    server: InspectorServer, width: int = 110, height: int = 30, **options: Any
) -> AsyncIterator[TerminalScreen]:
    app = InspectorApp(InspectorClient(server.url, server.key), **options)
    async with app.run_test(size=(width, height)) as pilot:
        yield TerminalScreen(app, pilot)


def check_snapshot(text: str, path: Path) -> None:
    """Compare with the file; with SNAPSHOTS=write the file is written instead."""
    if os.environ.get("SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert path.read_text() == text + "\n", f"{path.name} is another one; SNAPSHOTS=write takes the new one over"

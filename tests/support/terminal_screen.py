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
from textual.widgets import Input

from dynamo.cli.inspect.app import InspectorApp
from dynamo.cli.inspect.client import InspectorClient
from support.inspector_server import InspectorServer
from support.patience import PATIENCE_SECONDS

POLL_SECONDS = 0.02
HOPS = 6
"""How often a key may be passed on: to the app, its screen and a widget, and what this makes of it back again."""


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
        """Press keys, each when all has been done that the one before asked for.

        The pilot presses the next one when the process uses no time of the processor, as it also does where it gets none.
        """
        for key in keys:
            await self.pilot.press(key)
            for _ in range(HOPS):
                await self.pilot._wait_for_screen(PATIENCE_SECONDS)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        """Type into the field that is asked for."""
        await self.until(lambda: isinstance(self.app.focused, Input))
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

    async def shows_snapshot(self, path: Path, *words: str) -> None:
        """Wait until what is shown is what is in the file; with SNAPSHOTS=write the file is written once `words` are shown."""
        await self.shows(*words)
        await self.pilot.pause()
        wanted = _snapshot(path, self.text)
        await self.until(
            lambda: self.text == wanted, f"{path.name} is another one; SNAPSHOTS=write takes the new one over"
        )

    async def until(self, is_so: Callable[[], bool], problem: str = "waited in vain") -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not is_so():
                    await self.pilot.pause(POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(f"{problem}; the screen shows\n{self.text}") from None


@contextlib.asynccontextmanager
async def terminal_screen(
    server: InspectorServer, width: int = 110, height: int = 30, **options: Any
) -> AsyncIterator[TerminalScreen]:
    app = InspectorApp(InspectorClient(server.url, server.key), **options)
    async with app.run_test(size=(width, height)) as pilot:
        yield TerminalScreen(app, pilot)


def _snapshot(path: Path, text: str) -> str:
    """Return what is in the file."""
    if os.environ.get("SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    return path.read_text().removesuffix("\n")

"""The other processes on the same port, as seen from one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

TOKEN_KEY: Final = "inspector/token"
"""The shared value that is the token of the inspector: one for all processes of a group."""


class Peers(Protocol):
    """The other processes on the same port, as seen from one of them (`--workers`)."""

    async def gather(self) -> list[bytes]:
        """Return a snapshot of each process's metrics, this process included. Raises TimeoutError."""

    async def share(self, key: str, value: bytes) -> None:
        """Send the value of `key` to all processes, also to processes that start later. Raises TimeoutError."""

    def on_shared(self, take: Callable[[str, bytes], None]) -> None:
        """Call `take(key, value)` for each value that another process shares."""

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]:
        """Return the other processes' answers, and the names of those that gave none in time. Raises TimeoutError."""

    def on_asked(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer the requests of the other processes with what `answer` returns."""

    def describe(self) -> Mapping[str, int]:
        """Return how many processes there are, for `/health`."""

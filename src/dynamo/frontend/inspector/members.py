"""What the processes of one port ask each other, so that any of them answers for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from dynamo.frontend.inspector.pictures import PictureQuery

__all__ = [
    "TOKEN_KEY",
    "AskAbort",
    "AskAbortMatching",
    "AskBundle",
    "AskDetail",
    "AskPicture",
    "GroupPeer",
    "Members",
    "Question",
]

TOKEN_KEY: Final = "inspector/token"
"""Under which the parent of a group shares the token that all processes let in."""

T = TypeVar("T")


class AskPicture(Struct, frozen=True, tag=True):
    """What do you show?"""

    query: PictureQuery


class AskDetail(Struct, frozen=True, tag=True):
    """What do you know of this request?"""

    id: str
    with_content: bool = False


class AskBundle(Struct, frozen=True, tag=True):
    """What is kept of this failure?"""

    id: str


class AskAbort(Struct, frozen=True, tag=True):
    """End this request, if you have it."""

    id: str
    reason: str


class AskAbortMatching(Struct, frozen=True, tag=True):
    """End, or count, the requests that a filter holds for."""

    filter: str
    reason: str
    dry_run: bool


Question = AskPicture | AskDetail | AskBundle | AskAbort | AskAbortMatching


class GroupPeer(Protocol):
    """What is needed of the other processes."""

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]: ...

    def on_asked(self, answer: Callable[[bytes], bytes]) -> None: ...

    async def share(self, key: str, value: bytes) -> None: ...

    def on_shared(self, take: Callable[[str, bytes], None]) -> None: ...


class Members:
    """The other processes of the port; none where this one is alone."""

    def __init__(self, peers: GroupPeer | None, answer: Callable[[Question], Any]) -> None:
        """`answer`: what this process says to a question."""
        self.peers, self._answer = peers, answer
        if peers is not None:
            peers.on_asked(self._on_asked)

    async def ask(self, question: Question, kind: type[T]) -> tuple[list[T], list[str]]:
        """Return the answers of the others, and the names of those that gave none."""
        if self.peers is None:
            return [], []
        try:
            answers, silent = await self.peers.ask(msgspec.msgpack.encode(question))
        except TimeoutError:
            return [], ["the other processes"]
        return [msgspec.msgpack.decode(each, type=kind) for each in answers], silent

    def _on_asked(self, question: bytes) -> bytes:
        return msgspec.msgpack.encode(self._answer(msgspec.msgpack.decode(question, type=Question)))

"""What the processes of one port, and the frontends of a cluster, request of each other, so that any of them answers for all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from dynamo.frontend.parts.inspector.other_frontends import OtherFrontends, PeerAnswers
from dynamo.frontend.parts.inspector.pictures import PictureQuery

"""Under which the parent of a group shares the token that all processes let in."""

OTHER_VERSION: Final = "a frontend of another version"

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AskPicture(Struct, frozen=True, tag=True):
    """What do you show?"""

    query: PictureQuery
    hides_texts: bool = False  # of errors: they may repeat what clients wrote


class AskDetail(Struct, frozen=True, tag=True):
    """What do you know of this request?"""

    id: str
    with_content: bool = False


class AskBundle(Struct, frozen=True, tag=True):
    """What is kept of this failure?"""

    id: str
    with_content: bool = False


class AskAbort(Struct, frozen=True, tag=True):
    """End this request, if you have it."""

    id: str
    reason: str


class AskAbortMatching(Struct, frozen=True, tag=True):
    """End, or count, the requests that a filter holds for."""

    filter: str
    reason: str
    dry_run: bool


class AskHold(Struct, frozen=True, tag=True):
    """Keep this worker from new requests, or take that back. Only frontends call each other: a group shares its holds.

    The answer is empty; a process that does not do so is named as silent.
    """

    worker: str
    kind: str  # as `WorkerHold` has it
    by: str
    reason: str
    ends_ms: int | None  # since the epoch; None: no end


Question = AskPicture | AskDetail | AskBundle | AskAbort | AskAbortMatching | AskHold


class GroupPeer(Protocol):
    """What is needed of the other processes."""

    async def ask(self, question: bytes) -> tuple[list[bytes], list[str]]: ...

    def on_asked(self, answer: Callable[[bytes], bytes]) -> None: ...

    async def share(self, key: str, value: bytes) -> None: ...

    def on_shared(self, take: Callable[[str, bytes], None]) -> None: ...


class Members:
    """The other processes of the port, and the other frontends; none where this one is alone."""

    def __init__(self, peers: GroupPeer | None, answer: Callable[[Question], Any]) -> None:
        """`answer`: the answer of this process to a question."""
        self.peers, self._answer = peers, answer
        self.others: OtherFrontends | None = None  # where the inspectors of a cluster call each other
        if peers is not None:
            peers.on_asked(self._on_asked)

    async def ask(self, question: Question, kind: type[T]) -> tuple[list[T], list[str]]:
        """Return the answers of the other processes, and of the other frontends, and the names of those that gave none."""
        asked = msgspec.msgpack.encode(question)
        if self.others is None:
            answers, silent = await self._ask_group(asked)
        else:
            own, others = await asyncio.gather(self._ask_group(asked), self.others.ask(asked))
            answers, silent = [*own[0], *others[0]], [*own[1], *others[1]]
        found = []
        for each in answers:
            try:
                found.append(msgspec.msgpack.decode(each, type=kind))
            except msgspec.MsgspecError as error:  # of another version, as while a cluster is upgraded
                logger.info("an answer of another frontend is not understood, and is left out: %s", error)
                silent = [*silent, OTHER_VERSION]
        return found, silent

    async def ask_frontends(self, question: Question) -> list[str]:
        """Let the other frontends do something; return the names of those that did not, or not in time."""
        if self.others is None:
            return []
        _, silent = await self.others.ask(msgspec.msgpack.encode(question))
        return silent

    async def answer_for_all(self, question: Question) -> PeerAnswers:
        """Return the answers of the processes of this frontend to a question of another frontend."""
        asked = msgspec.msgpack.encode(question)
        answers, silent = await self._ask_group(asked)
        return PeerAnswers([self._on_asked(asked), *answers], silent)

    async def _ask_group(self, question: bytes) -> tuple[list[bytes], list[str]]:
        if self.peers is None:
            return [], []
        try:
            return await self.peers.ask(question)
        except TimeoutError:
            return [], ["the other processes"]

    def _on_asked(self, question: bytes) -> bytes:
        return msgspec.msgpack.encode(self._answer(msgspec.msgpack.decode(question, type=Question)))

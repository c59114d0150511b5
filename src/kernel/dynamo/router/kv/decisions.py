"""Decisions on record: every one as a line of a file, to be computed again, or decided by another policy.

A file begins with a `DecisionHeader` (and so does every further life of its writer); each other line is a `DecisionRecord`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, Final

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.kv.overlap import WorkerRank
from dynamo.placement.kv_state import KvChoice, KvPolicy, KvState, Selection
from dynamo.placement.policies.kv_policies import kv_policy

logger = logging.getLogger(__name__)

VERSION: Final = 1
FLUSH_SECONDS: Final = 0.5  # how long a line may stay in memory

Parameter = float | int | str | bool


class DecisionHeader(msgspec.Struct, frozen=True, tag="header", tag_field="kind"):
    """What holds for the decisions behind it: how they were made."""

    policy: str  # its type name
    parameters: Mapping[str, Parameter] = {}
    version: int = VERSION
    shadow: str | None = None  # the policy that decides beside it
    shadow_parameters: Mapping[str, Parameter] = {}


class DecisionRecord(msgspec.Struct, frozen=True, tag="decision", tag_field="kind"):
    """One decision: what it was made from, and what it was."""

    request_id: str
    model: str
    state: KvState
    draw: float
    rank: WorkerRank
    cost: float
    cached_tokens: int = 0
    shadow_rank: WorkerRank | None = None  # None: there is no shadow, or it failed
    shadow_cost: float = 0.0


_LINE: Final = msgspec.json.Decoder(DecisionHeader | DecisionRecord)


class DecisionLog:
    """Appends decisions to a file, which is moved to `FILE.1` when it is full: at most two are kept.

    A file that cannot be written ends the recording with one error in the log, and nothing else. On the event loop only.
    """

    def __init__(self, path: str, header: DecisionHeader, *, limit_bytes: int) -> None:
        """Raises OSError when the file cannot be opened."""
        self._path, self._header, self._limit = path, msgspec.json.encode(header) + b"\n", limit_bytes
        self._file: BinaryIO | None = None
        self._size = 0
        self._flushing: asyncio.TimerHandle | None = None
        self._encoder = msgspec.json.Encoder()
        self._open()

    def _open(self) -> None:
        self._file = open(self._path, "ab")  # noqa: SIM115 - it stays open
        self._size = self._file.tell() + len(self._header)
        self._file.write(self._header)

    def record(self, request_id: str, model: str, selection: Selection) -> None:
        """Append one decision."""
        if self._file is None:
            return
        choice, shadow = selection.choice, selection.shadow
        made = DecisionRecord(
            request_id, model, selection.state, choice.draw, choice.rank, choice.cost, selection.cached_tokens,
            None if shadow is None else shadow.rank, 0.0 if shadow is None else shadow.cost,
        )  # fmt: skip
        line = self._encoder.encode(made) + b"\n"
        try:
            if self._size + len(line) > self._limit:
                self._file.close()
                os.replace(self._path, f"{self._path}.1")
                self._open()
            self._file.write(line)
            self._size += len(line)
        except OSError as error:
            self._give_up(error)
            return
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what is still in memory."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write what is left, and close the file. Idempotent."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _give_up(self, error: OSError) -> None:
        logger.error("decisions are no longer recorded in %s: %s", self._path, error)
        self._file = None


def read_decisions(lines: Iterable[bytes], source: str = "") -> Iterator[tuple[DecisionHeader, DecisionRecord]]:
    """Yield the decisions of a file, each with what it was made by.

    Raises InvalidArgument that names the line. A last line that breaks off in the middle, as a killed writer leaves it, is
    passed over.
    """
    header: DecisionHeader | None = None
    broken: tuple[int, Exception] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if broken is not None:
            raise InvalidArgument(f"{source} line {broken[0]} is not a recorded decision: {broken[1]}")
        try:
            found = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            broken = (number, error)
            continue
        if isinstance(found, DecisionRecord):
            if header is None:
                raise InvalidArgument(f"{source} line {number} comes before the line that names the policy")
            yield header, found
        elif found.version != VERSION:
            raise InvalidArgument(
                f"{source} line {number} is of version {found.version}, and this is version {VERSION}"
            )
        else:
            header = found
    if broken is not None and header is None:
        raise InvalidArgument(f"{source} line {broken[0]} is not a recorded decision: {broken[1]}")


def recompute(policy: KvPolicy, record: DecisionRecord) -> KvChoice:
    """Return what `policy` chooses in the place of a recorded decision, with the same chance."""
    return policy.choose(record.state, record.draw)


class RecordedPolicies:
    """The policies that headers of a recording name, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, KvPolicy] = {}

    def named(self, name: str, parameters: Mapping[str, Parameter]) -> KvPolicy:
        """Return a policy. Raises InvalidArgument for one that cannot be made here."""
        key = f"{name} {sorted(parameters.items())}"
        if key not in self._made:
            self._made[key] = kv_policy(name, parameters)
        return self._made[key]

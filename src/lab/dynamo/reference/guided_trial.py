"""Compiles a grammar in a process of its own first, so that one that crashes or never ends costs no worker.

llguidance is native code: a grammar deep enough overflows its stack, and there is no exception for that. What it compiles
cannot be handed from process to process, so a grammar that the child survived is compiled once more in the worker. The
child returns llguidance's own text of the grammar; only that text is compiled here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dynamo.errors import WorkerUnavailable
from dynamo.protocol.openai.shapes import JsonObject

logger = logging.getLogger(__name__)

_CHILD: Final = Path(__file__).with_name("guided_trial_child.py")
START_SECONDS: Final = 60.0  # reading a tokenizer of 128,000 words takes 1 to 2 s on an idle machine
WALL_FACTOR: Final = 10.0  # how much longer than its CPU time a trial may take on a busy machine
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


class GrammarRefused(Exception):
    """A grammar cannot be used; the text continues a sentence that begins with the member's name."""

    def __init__(self, reason: str, *, kind: str) -> None:
        """`kind`: "invalid", "crash" or "timeout", for the counters."""
        super().__init__(reason)
        self.kind = kind


class _KilledFromOutside(GrammarRefused):
    """A signal that no grammar raises ended the child."""


class GrammarTrial:
    """One child process, started with the first grammar and replaced when it dies. Used by one thread at a time."""

    def __init__(self, tokenizer_json: str, *, n_vocab: int, eos: Sequence[int], cpu_seconds: float) -> None:
        self._setup = {"tokenizer": tokenizer_json, "n_vocab": n_vocab, "eos": list(eos)}
        self._cpu_seconds = cpu_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # the child has read its tokenizer
        self.count = 0  # grammars that were tried

    @property
    def process_id(self) -> int | None:
        """The child's, while there is one."""
        return None if self._child is None else self._child.pid

    def run(self, kind: str, text: str, whitespace: str | None) -> str:
        """Return llguidance's form of a grammar that compiles.

        Raises:
            GrammarRefused: the grammar is wrong, took too long, or ended the child.
            WorkerUnavailable: no child can be started on this machine now.
        """
        self.count += 1
        constraint = {"kind": kind, "text": text, "whitespace": whitespace, "cpu_seconds": self._cpu_seconds}
        try:
            answer = self._ask(constraint)
        except _KilledFromOutside:
            # By an operator, or for lack of memory: once may be chance and not the grammar's fault.
            answer = self._ask(constraint)
        if (complaint := answer.get("error")) is not None:
            raise GrammarRefused(f"cannot be compiled: {complaint}", kind="invalid")
        if "grammar" not in answer:  # the child's thread ended by an exception, a MemoryError as a rule
            self.close()
            raise GrammarRefused("cannot be compiled within the memory that a trial has", kind="crash")
        return str(answer["grammar"])

    def _ask(self, constraint: JsonObject) -> JsonObject:
        child = self._ready_child()
        try:
            _send(child, constraint)
            return _receive(child, self._cpu_seconds * WALL_FACTOR)
        except (_Silent, OSError) as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        """End the child. The next grammar starts another."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __del__(self) -> None:  # of an engine that was not cleaned up: no process may stay behind
        self.close()

    def start(self) -> None:
        """Start the child, which reads its tokenizer while the caller does something else. Raises WorkerUnavailable."""
        try:
            # -P: this folder must not come first among the places where modules are searched.
            child = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise WorkerUnavailable(f"the process that tries grammars cannot be started: {error}") from error
        self._child, self._is_ready = child, False
        try:
            _send(child, self._setup)
        except OSError as error:
            self.close()
            raise WorkerUnavailable("the process that tries grammars ended while it started") from error

    def _ready_child(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self.start()
        child = self._child
        if child is None:
            raise WorkerUnavailable("the process that tries grammars was closed")
        if not self._is_ready:
            try:
                _receive(child, START_SECONDS)
            except (_Silent, OSError) as error:
                self.close()
                raise WorkerUnavailable("the process that tries grammars ended while it started") from error
            self._is_ready = True
        return child

    def _refusal(self, error: Exception) -> GrammarRefused:
        """Replace the child and return why its grammar is refused."""
        child = self._child
        if child is not None and not isinstance(error, _TooSlow):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)
        status = None if child is None else child.returncode
        self.close()
        if isinstance(error, _TooSlow) or status == -signal.SIGPROF:
            logger.warning("a grammar was refused: it took more than %g s to compile", self._cpu_seconds)
            return GrammarRefused(
                f"takes more than {self._cpu_seconds:g} s to compile (DYN_GUIDED_COMPILE_SECS)", kind="timeout"
            )
        kind = _KilledFromOutside if status in (-signal.SIGKILL, -signal.SIGTERM) else GrammarRefused
        logger.warning("a grammar was refused: it ended the process that tried it with status %s", status)
        return kind(
            "ends its compiler: give it fewer rules or references, or let fewer of them name each other in turn",
            kind="crash",
        )


class _Silent(Exception):
    """The child has gone."""


class _TooSlow(_Silent):
    """The child did not answer in time."""


def _send(child: subprocess.Popen[bytes], message: Any) -> None:
    assert child.stdin is not None
    body = json.dumps(message).encode()
    child.stdin.write(struct.pack("<I", len(body)) + body)
    child.stdin.flush()


def _receive(child: subprocess.Popen[bytes], seconds: float) -> JsonObject:
    deadline = time.monotonic() + seconds
    (length,) = struct.unpack("<I", _read(child, 4, deadline))
    if length > MAX_ANSWER_BYTES:
        raise _Silent
    answer: JsonObject = json.loads(_read(child, length, deadline))
    return answer


def _read(child: subprocess.Popen[bytes], wanted: int, deadline: float) -> bytes:
    assert child.stdout is not None
    found = bytearray()
    number = child.stdout.fileno()
    poll = select.poll()
    poll.register(number, select.POLLIN)
    while len(found) < wanted:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise _TooSlow
        block = os.read(number, min(wanted - len(found), 1 << 20))
        if not block:
            raise _Silent
        found += block
    return bytes(found)

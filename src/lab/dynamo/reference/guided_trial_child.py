"""The process in which a grammar is compiled before the worker compiles it: started by `guided_trial`, run as a script.

Imports nothing of this package, so that it starts in a tenth of a second. Messages are JSON objects behind four bytes of
length, in both directions.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

MAX_STACK_BYTES = 4 * 1024 * 1024
MEMORY_BYTES = 4 * 1024 * 1024 * 1024  # of addresses; a grammar that needs more ends this process alone


def read_message(source: BinaryIO) -> Any:
    """Return the next message, or None at the end of the stream."""
    head = source.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    return json.loads(source.read(length))


def write_message(target: BinaryIO, message: Any) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    target.write(struct.pack("<I", len(body)) + body)
    target.flush()


def make_grammar(kind: str, text: str, whitespace: str | None) -> str:
    """Return llguidance's form of one constraint. Raises ValueError naming what is wrong with it."""
    import llguidance

    if kind == "json":
        options = {"whitespace_pattern": whitespace}
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options))  # type: ignore[arg-type]
    if kind == "lark":
        return str(llguidance.LLMatcher.grammar_from_lark(text))
    return str(llguidance.grammar_from(kind, text))  # type: ignore[arg-type]


def attempt(tokenizer: Any, constraint: dict[str, Any]) -> dict[str, str]:
    """Compile one constraint and do with it what a worker does first; the grammar, or what is wrong."""
    import llguidance

    try:
        grammar = make_grammar(constraint["kind"], constraint["text"], constraint["whitespace"])
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def trial_stack_bytes() -> int:
    """Return half of the stack that a thread of the worker has, so that what fits here fits there."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    thread_bytes = 2 * 1024 * 1024 if soft == resource.RLIM_INFINITY else soft  # as the C library chooses it
    return max(256 * 1024, min(MAX_STACK_BYTES, thread_bytes // 2) // 65536 * 65536)


def main() -> None:
    """Read the tokenizer, then answer constraints until the worker closes the pipe."""
    import llguidance

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which closes the pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside native code
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not become a message
    setup = read_message(source)
    if setup is None:
        return
    tokenizer = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["n_vocab"], eos_token=setup["eos"] or None)
    write_message(target, {})
    threading.stack_size(trial_stack_bytes())
    while (constraint := read_message(source)) is not None:
        answer: dict[str, str] = {}
        # Time of this process's own, so that a busy machine refuses nothing.
        signal.setitimer(signal.ITIMER_PROF, constraint["cpu_seconds"])
        thread = threading.Thread(target=lambda told=constraint, out=answer: out.update(attempt(tokenizer, told)))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(target, answer)


if __name__ == "__main__":
    main()

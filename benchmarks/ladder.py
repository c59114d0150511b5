"""Where the frontend's CPU of a one-token request goes, stay by stay: a sampling profile of the real process under load.

A second start of the same stack has a sampler in its frontend: the kernel sends SIGPROF as the process uses CPU, and the
handler counts the stack of Python functions that it finds. Python runs the handler between two bytecodes, so time in C code
is charged to the function that called it, which is what a stay wants. A stack belongs to the stay of its innermost
function that `STAYS` names.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stack import PATIENCE_SECONDS, Stack

SAMPLER: Final = """
import os, signal, sys

stacks = {}

def sample(number, frame):
    codes = []
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    key = tuple(codes)
    stacks[key] = stacks.get(key, 0) + 1

def toggle(number, frame):
    if signal.getitimer(signal.ITIMER_PROF)[1] == 0:
        stacks.clear()
        signal.signal(signal.SIGPROF, sample)
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
        with open(os.environ["SAMPLES_FILE"] + ".on", "w"):
            pass
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    import json
    with open(os.environ["SAMPLES_FILE"] + ".new", "w") as file:
        json.dump([[[f"{c.co_filename}:{c.co_qualname}" for c in reversed(key)], n] for key, n in stacks.items()], file)
    os.replace(os.environ["SAMPLES_FILE"] + ".new", os.environ["SAMPLES_FILE"])

if os.environ.get("SAMPLES_FILE") and "dynamo.frontend" in " ".join(sys.orig_argv):
    signal.signal(signal.SIGUSR1, toggle)
"""

OTHER: Final = "other"
STAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "HTTP": (
        "runtime/http/connection.py:HttpConnection.",
        "runtime/http/cycle.py:Cycle.receive",
        "frontend/admission/",
    ),
    "decode": ("frontend/apis/chat.py:ChatApi.decode", "protocol/openai/reader.py:RequestReader.read"),
    "checks": (
        "frontend/pipeline/reading.py:CallReader.",
        "frontend/pipeline/request_records.py:begin_record",
        "protocol/openai/shapes.py:",
    ),
    "template": ("frontend/pipeline/preprocess.py:Preprocessor._prompt",),
    "tokeniser": ("frontend/pipeline/preprocess.py:Preprocessor._encode",),
    "plan": (
        "frontend/apis/chat.py:ChatApi.prepare",
        "frontend/pipeline/api.py:Answer.__init__",
        "frontend/pipeline/generation_call.py:open_only_choice",
        "frontend/pipeline/preprocess.py:Preprocessor.plan",
        "frontend/pipeline/inference.py:Call._work",
    ),
    "choice": ("router/dispatch/failover.py:", "router/dispatch/course.py:", "router/workers/", "router/kv/"),
    "open": (
        "router/dispatch/drive.py:",
        "router/dispatch/stream.py:",
        "router/dispatch/answer_leg.py:",
        "runtime/client.py:Client.open",
    ),
    "first event": (
        "runtime/calls/request_plane/mux/connection.py:MuxConnection.data_received",
        "runtime/calls/request_plane/stream.py:StreamBuffer.next_batch",
        "frontend/pipeline/choice.py:",
    ),
    "answer": (
        "frontend/pipeline/generation_call.py:",
        "frontend/http/inference_route.py:AsgiSink.",
        "frontend/apis/chat.py:_ChatRenderer",
        "frontend/pipeline/api.py:Renderer.",
        "frontend/pipeline/api.py:Api.response_id",
    ),
    "end": (
        "frontend/base/stage_timer.py:",
        "frontend/pipeline/inference.py:Call._report",
        "frontend/pipeline/inference.py:Call._ended",
        "frontend/pipeline/request_records.py:end_record",
    ),
    "loop": (),
}
"""Stay to the beginnings of the functions (file of the package, colon, name) whose time is its own."""
LOOP: Final = ("asyncio/runners.py", "asyncio/tasks.py")
"""Where the stack ends while the loop itself reads, waits or steps tasks, all of which is C code, and where a request leaves its turn."""
DRIVERS: Final = ("frontend/pipeline/generation_call.py:GenerationCall.",)
"""Functions that only call the stays, though a beginning above fits them."""


def stay_of(stack: Iterable[str]) -> str:
    """Return the stay of one stack, outermost function first: that of the innermost function that has one."""
    functions = list(stack)
    if functions[-1].rpartition(":")[0].endswith(LOOP):
        return "loop"
    for function in reversed(functions):
        name = function.rpartition("/dynamo/")[2]
        if name.startswith(DRIVERS):
            continue
        for stay, beginnings in STAYS.items():
            if name.startswith(beginnings):
                return stay
    return OTHER


def shares(samples: Iterable[tuple[list[str], int]]) -> dict[str, float]:
    """Return the part of each stay in all samples, and of what fits none."""
    found: Counter[str] = Counter()
    for stack, count in samples:
        found[stay_of(stack)] += count
    if not (total := found.total()):
        raise RuntimeError("the sampler saw nothing: the load was too short")
    return {stay: found[stay] / total for stay in (*STAYS, OTHER)}


@contextmanager
def sampling(folder: Path) -> Iterator[Path]:
    """Give frontends that start meanwhile the sampler; yield the file to which they write."""
    (folder / "sitecustomize.py").write_text(SAMPLER)
    result = folder / "samples.json"
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), *([before] if before else [])])
    os.environ |= {"PYTHONPATH": path, "SAMPLES_FILE": str(result)}
    try:
        yield result
    finally:
        del os.environ["SAMPLES_FILE"], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def toggle(running: Stack, appears: Path) -> None:
    """Start or stop the sampler, and wait for the file with which it says so."""
    os.kill(running.pids["frontend"], signal.SIGUSR1)
    until = time.monotonic() + PATIENCE_SECONDS
    while not appears.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{appears} did not appear")
        time.sleep(0.01)


def read(result: Path) -> dict[str, float]:
    """Return the shares of the samples in a file."""
    return shares((stack, count) for stack, count in json.loads(result.read_text()))

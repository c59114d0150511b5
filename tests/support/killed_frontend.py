"""Runs a frontend that kills itself at a step of a batch: `python killed_frontend.py -m dynamo.frontend ...` with KILLED_AT set."""

from __future__ import annotations

import os
import signal
import sys

from dynamo.frontend.__main__ import main
from dynamo.frontend.parts.batches import part
from dynamo.frontend.parts.batches.service import BatchService


def kill_at(step: str) -> None:
    """Die as by `kill -9` when that step is done."""
    if step == os.environ["KILLED_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)


def make(*args: object) -> BatchService:
    return BatchService(*args, after_step=kill_at)  # type: ignore[arg-type]


if __name__ == "__main__":
    vars(part)["BatchService"] = make
    sys.argv = [sys.argv[0], *sys.argv[3:]]
    main()

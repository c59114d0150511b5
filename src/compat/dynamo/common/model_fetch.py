"""A model's directory before its engine starts: fetched here, or by a process of its own.

`python -m dynamo.common.model_fetch NAME` prints what came of a fetch as a line of JSON, `{"path": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from typing import Final

import msgspec

from dynamo.errors import CannotConnect, DynamoException
from dynamo.worker import hub

__all__ = ["NGC_URI_PREFIX", "fetch_model", "fetch_model_in_subprocess", "needs_local_model_path"]

NGC_URI_PREFIX: Final = "ngc://"

_WITHOUT_WEIGHTS: Final = "--ignore-weights"


class _Outcome(msgspec.Struct, omit_defaults=True):
    path: str | None = None
    error: str | None = None


def needs_local_model_path(model: str) -> bool:
    """Return whether a name means nothing to an engine, which must be given the directory."""
    return model.startswith(NGC_URI_PREFIX)


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Return a model's directory on this machine, as `dynamo.llm.fetch_model` does.

    Raises CannotConnect where it cannot be fetched. No model of NGC can: it has to be downloaded before.
    """
    if needs_local_model_path(remote_name):
        raise CannotConnect(f"NGC is not supported ({remote_name}): download the model, and name its directory")
    return await hub.fetch_model(remote_name, ignore_weights)


async def fetch_model_in_subprocess(remote_name: str, ignore_weights: bool = False) -> str:
    """Return a model's directory, fetched in another process: no thread and no connection of the fetch is left in this one.

    Raises RuntimeError with the reason where it cannot be fetched.
    """
    options = [_WITHOUT_WEIGHTS] if ignore_weights else []
    command = (sys.executable, "-m", __name__, *options, "--", remote_name)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    try:
        printed, logged = await process.communicate()
    finally:
        await _end(process)
    outcome = _outcome(printed)
    if outcome.path is None:
        reason = outcome.error or f"status {process.returncode}, {logged.decode(errors='replace')[-500:].strip()}"
        raise RuntimeError(f"{remote_name} was not fetched: {reason}")
    return outcome.path


async def _end(process: Process) -> None:
    """Leave no process behind, also where the fetch was cancelled."""
    if process.returncode is None:
        process.kill()
        await process.wait()


def _outcome(printed: bytes) -> _Outcome:
    """Read the last line that the process printed. What cannot be read is an outcome of neither kind."""
    try:
        return msgspec.json.decode(printed.strip().rpartition(b"\n")[2], type=_Outcome)
    except msgspec.MsgspecError:
        return _Outcome()


def main() -> None:
    """Fetch one model and print the outcome."""
    parser = argparse.ArgumentParser(prog="python -m dynamo.common.model_fetch")
    parser.add_argument("name")
    parser.add_argument(_WITHOUT_WEIGHTS, action="store_true")
    given = parser.parse_args()
    try:
        outcome = _Outcome(path=asyncio.run(fetch_model(given.name, given.ignore_weights)))
    except DynamoException as error:
        outcome = _Outcome(error=f"{type(error).__name__}: {error}")
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
    sys.exit(outcome.path is None)


if __name__ == "__main__":
    main()

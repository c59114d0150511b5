"""Fetching a model before its engine starts, under the native path."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from typing import Final

from dynamo.errors import CannotConnect
from dynamo.worker import hub

__all__ = ["NGC_URI_PREFIX", "fetch_model", "fetch_model_in_subprocess", "needs_local_model_path"]

NGC_URI_PREFIX: Final = "ngc://"
_PROGRAM: Final = """
import asyncio, sys
from dynamo.common.model_fetch import fetch_model
print(asyncio.run(fetch_model(sys.argv[1], bool(sys.argv[2]))))
"""


def needs_local_model_path(model: str) -> bool:
    """Return whether an engine cannot resolve this name itself and needs the directory."""
    return model.startswith(NGC_URI_PREFIX)


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Return the local directory of a model, as `dynamo.llm.fetch_model`. Raises CannotConnect, also for one of NGC."""
    if needs_local_model_path(remote_name):
        raise CannotConnect(f"fetch {remote_name!r}: models of NGC are not fetched; download it and give its directory")
    return await hub.fetch_model(remote_name, ignore_weights)


async def fetch_model_in_subprocess(remote_name: str, ignore_weights: bool = False) -> str:
    """Fetch a model in a process that ends, with its threads and connections. Raises RuntimeError with the reason."""
    arguments = ("-c", _PROGRAM, remote_name, "1" if ignore_weights else "")
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE)
    try:
        out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        reason = (err.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise RuntimeError(f"the process that fetches {remote_name!r} failed: {reason}")
    return out.decode().splitlines()[-1]

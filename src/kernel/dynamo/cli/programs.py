"""The programs of `dynamo serve`: command line, environment and time to end of the frontend and of each worker."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dynamo.supervise.process import Program

if TYPE_CHECKING:
    from dynamo.cli.serve import ServeOptions

KILL_RESERVE_SECONDS: Final = 5.0  # the child's own deadline comes first; this one is for a child that cannot keep it

GRACE_SECONDS: Final = 0.3
"""How long a worker still takes requests once it has left the store: the frontend reads it every 0.1 s."""


def programs(options: ServeOptions, listener: int, store: Path, environ: Mapping[str, str]) -> list[Program]:
    """Return the programs to start: the frontend, then the workers."""
    workers = (
        worker_program(options, store, environ, f"worker-{slot + 1}", slot)
        for slot in range(options.flags.workers.at_first)
    )
    found = [_frontend_program(options, listener, store, environ), *workers]
    return [replace(program, first_env=_chaos(options, program.name)) for program in found]


def _frontend_program(options: ServeOptions, listener: int, store: Path, environ: Mapping[str, str]) -> Program:
    env = _environment(store, environ)
    if options.flags.store is None:  # a private store holds what these workers register, whatever its namespace
        for name in ("DYN_NAMESPACE", "DYN_NAMESPACE_PREFIX"):
            env.pop(name, None)
    if options.own_key is not None:
        env["DYN_API_KEY"] = options.own_key
    limits = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": 5.0, "DYN_HTTP_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": 0.0}
    stop_seconds = sum(_seconds(env, name, default) for name, default in limits.items()) + KILL_RESERVE_SECONDS
    arguments = _child(
        *("frontend", stop_seconds, "--listener", str(listener), "--"),
        *("--http-host", options.flags.http_host, "--http-port", str(options.flags.http_port)),
        *(() if options.flags.admin_port is None else ("--admin-port", str(options.flags.admin_port))),
        *(() if options.flags.keys is None else ("--keys", options.flags.keys)),
        *_scaling_arguments(options),
        *options.frontend_args,
        *(() if options.flags.frontend_workers is None else ("--workers", str(options.flags.frontend_workers))),
    )
    return Program("frontend", arguments, env, stop_seconds, (listener,))


def _scaling_arguments(options: ServeOptions) -> tuple[str, ...]:
    """Return the flags of a frontend whose workers come and go by their load."""
    workers = options.flags.workers
    if workers.is_fixed:
        return ()
    on_demand = () if workers.least else ("--cold-start-wait-seconds", str(options.flags.cold_start_wait))
    return ("--autoscale", "--autoscale-target", str(options.flags.scale_target), *on_demand)


def worker_program(options: ServeOptions, store: Path, environ: Mapping[str, str], name: str, slot: int) -> Program:
    """Return a worker's program; no two that run at a time have the same `slot`, as fixed ports count up by it."""
    env = _environment(store, environ)
    env.pop("DYN_API_KEY", None)  # which is a secret between clients and the frontend
    limits = {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": 30.0, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": 5.0}
    deadline = sum(_seconds(env, name, default) for name, default in limits.items()) + KILL_RESERVE_SECONDS
    ports = {port: _nth_port(env.get(port, ""), slot) for port in ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT")}
    env |= {port: value for port, value in ports.items() if value}
    if env.pop("DYN_ADMIN_PORT", "") and env.get("DYN_SYSTEM_HOST"):  # the number is the frontend's
        env["DYN_ADMIN_PORT"] = "0"
    arguments = _child("worker", deadline, "--engine", options.engine, "--", *options.engine_args)
    return Program(name, arguments, env, deadline)


def _environment(store: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process."""
    # A process that takes the process of another is well: the plan is for the first incarnation of each (`programs`).
    env = {name: value for name, value in environ.items() if name != "DYN_CHAOS"}
    env |= {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "PYTHONUNBUFFERED": "1",  # lines arrive when they are written
    }
    env.setdefault("DYN_TCP_RPC_HOST", "127.0.0.1")
    env.setdefault("DYN_EVENT_PLANE_HOST", "127.0.0.1")
    env.setdefault("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", str(GRACE_SECONDS))
    return env


def _chaos(options: ServeOptions, name: str) -> Mapping[str, str]:
    if options.chaos is None:
        return {}
    return {"DYN_CHAOS": str(options.chaos), "DYN_ALLOW_CHAOS": "1", "DYN_CHAOS_NAME": name}


def _child(role: str, kill_after: float, *more: str) -> tuple[str, ...]:
    head = (sys.executable, "-m", "dynamo.cli.child", role, "--kill-after", str(kill_after), "--report", "{report}")
    return (*head, *more)


def _nth_port(text: str, index: int) -> str:
    """Return the fixed port of the worker in slot `index`: ports count up. 0, and a text that is not a number, stay as they are."""
    return str(int(text) + index) if text.isascii() and text.isdigit() and int(text) > 0 else text


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    """Read a number as the children do, which warn about a value that cannot be read.

    Importing their reader would cost more than it saves: this process has none of the runtime in it.
    """
    try:
        value = float(env.get(name, "").strip() or default)
    except ValueError:
        return default
    return max(0.0, value) if math.isfinite(value) else default

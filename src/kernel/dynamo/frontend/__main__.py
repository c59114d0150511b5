"""`python -m dynamo.frontend`: flags in, one frontend out, until a signal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from socket import socket
from typing import Final

from dynamo.errors import DynamoException
from dynamo.frontend.app import Frontend
from dynamo.frontend.args import parse_args
from dynamo.frontend.base.offload import keep_large_blocks_apart
from dynamo.frontend.http.admin import log_exposure
from dynamo.frontend.http.loops import event_loop_factory, spare_the_collector
from dynamo.frontend.http.server import PortInUse, bind_admin, bind_listeners, close_listeners, serve_until_signal
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.calls.faults import injection
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.logging import configure_dynamo_logging


def main(argv: Sequence[str] | None = None, *, listeners: Sequence[socket] = ()) -> int:
    """Serve until SIGTERM or SIGINT. 0 after a clean end, 1 with one line when it could not start, 2 after an error of use.

    `listeners`: bound sockets that stand in for those of the flags (`dynamo serve` keeps them itself).
    """
    configure_dynamo_logging()  # first: variables that cannot be read are warnings
    settings = parse_args(argv)
    with ExitStack() as bound:
        try:
            # Before anything else: a taken port is the most common mistake and should cost no start-up.
            listeners = listeners or bind_listeners(settings)
            bound.callback(close_listeners, listeners)
            admin = bind_admin(settings)
        except PortInUse as error:
            print(error, file=sys.stderr)  # noqa: T201 - the command line's own voice
            return 1
        except DynamoException as error:
            print(f"Failed to start HTTP server: {error}", file=sys.stderr)  # noqa: T201
            return 1
        except OSError as error:
            reason = f"cannot listen on {settings.http_host}: {error}"
            print(f"Failed to start HTTP server: {reason}", file=sys.stderr)  # noqa: T201
            return 1
        return _run(settings, sys.argv[1:] if argv is None else argv, listeners, admin)


def _run(settings: FrontendSettings, argv: Sequence[str], listeners: Sequence[socket], admin: socket | None) -> int:
    log_exposure(settings)
    _import_ahead(settings)
    spare_the_collector()
    keep_large_blocks_apart()
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            if settings.workers > 1:
                # By its name, as the kernel imports nothing of the wing `parts`.
                group = import_module("dynamo.frontend.parts.group.supervisor")
                code: int = runner.run(group.Supervisor(settings, argv, listeners, admin=admin).run())
                return code
            runner.run(_serve(settings, listeners, admin))
    except DynamoException as error:
        print(f"Failed to start the frontend: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:  # before the signal handlers stood: nothing has begun that needs an end
        return 130
    return 0


_AHEAD: Final = (
    "dynamo.runtime.calls.request_plane.mux.client",
    "dynamo.runtime.calls.event_plane.zmq",
    "zmq",
    "numpy",
)


def _import_ahead(settings: FrontendSettings) -> None:
    """Import what the first worker, or a large fleet, would need: later each of it would hold up the event loop for 20 to 100 ms."""
    for name in _AHEAD if settings.router_mode == "kv" else _AHEAD[:1]:
        with suppress(ImportError):  # an extra that is not installed; what needs it reports that
            import_module(name)


async def _serve(settings: FrontendSettings, listeners: Sequence[socket], admin: socket | None) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, None, None, settings=settings.runtime)
    try:
        _plan_chaos(settings, runtime)
        async with Frontend(settings, runtime) as frontend:
            await serve_until_signal(frontend, listeners=listeners, admin=admin)
    finally:
        await runtime.aclose()


def _plan_chaos(settings: FrontendSettings, runtime: DistributedRuntime) -> None:
    """Start fault injection where a plan requests it."""
    chaos = settings.runtime.chaos
    if chaos.plan is not None:
        runtime.planes.client_stand_in = injection().frontend_faults(chaos)


if __name__ == "__main__":
    sys.exit(main())

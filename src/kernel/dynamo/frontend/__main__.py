"""`python -m dynamo.frontend`: flags in, one frontend out, until a signal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from importlib import import_module
from socket import socket

from dynamo.errors import DynamoException
from dynamo.frontend.app import Frontend
from dynamo.frontend.args import parse_args
from dynamo.frontend.base.offload import keep_large_blocks_apart
from dynamo.frontend.http.admin import log_exposure
from dynamo.frontend.http.loops import event_loop_factory, spare_the_collector
from dynamo.frontend.http.server import PortInUse, bind, bind_admin, serve_until_signal
from dynamo.frontend.settings import FrontendSettings
from dynamo.runtime.calls.faults import injection
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.logging import configure_dynamo_logging


def main(argv: Sequence[str] | None = None, *, listener: socket | None = None) -> int:
    """Serve until SIGTERM or SIGINT. 0 after a clean end, 1 with one line when it could not start, 2 after an error of use.

    `listener`: a bound socket that stands in for the address of the flags (`dynamo serve` keeps the port itself).
    """
    configure_dynamo_logging()  # first: variables that cannot be read are warnings
    settings = parse_args(argv)
    try:
        # Before anything else: a taken port is the most common mistake and should cost no start-up.
        listener = listener or bind(settings.http_host, settings.http_port)
        admin = bind_admin(settings)
    except PortInUse as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command line's own voice
        return 1
    except DynamoException as error:
        print(f"Failed to start HTTP server: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except OSError as error:
        print(f"Failed to start HTTP server: cannot listen on {settings.http_host}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    log_exposure(settings)
    spare_the_collector()
    keep_large_blocks_apart()
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            if settings.workers > 1:
                # By its name, as the kernel imports nothing of the wing `parts`.
                group = import_module("dynamo.frontend.parts.group.supervisor")
                own_argv = sys.argv[1:] if argv is None else argv
                code: int = runner.run(group.Supervisor(settings, own_argv, listener, admin=admin).run())
                return code
            runner.run(_serve(settings, listener, admin))
    except DynamoException as error:
        print(f"Failed to start the frontend: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:  # before the signal handlers stood: nothing has begun that needs an end
        return 130
    return 0


async def _serve(settings: FrontendSettings, listener: socket, admin: socket | None) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, None, None, settings=settings.runtime)
    try:
        _plan_chaos(settings, runtime)
        async with Frontend(settings, runtime) as frontend:
            await serve_until_signal(frontend, listener=listener, admin=admin)
    finally:
        await runtime.aclose()


def _plan_chaos(settings: FrontendSettings, runtime: DistributedRuntime) -> None:
    """Start fault injection where a plan requests it."""
    chaos = settings.runtime.chaos
    if chaos.plan is not None:
        runtime.planes.client_stand_in = injection().frontend_faults(chaos)


if __name__ == "__main__":
    sys.exit(main())

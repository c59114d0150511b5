"""`python -m dynamo.router --endpoint ns.comp.ep`: a KV-aware router in front of the workers of any endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from dynamo.errors import DynamoException, text_of
from dynamo.kv.index import PrefixIndex
from dynamo.router.kv.domains import policy_of
from dynamo.router.standalone.routed_endpoint import new_router, routed_endpoint
from dynamo.router.standalone.service import RouterService, RouterServiceSettings
from dynamo.router.standalone.worker_reports import busy_filter
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.log_text import one_line
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.table import read_settings, settings_of

logger = logging.getLogger(__name__)

_WORKERS_ONLY: Final = frozenset({"engine_request_limit"})  # of the runtime's flags
_FRONTEND_ONLY: Final = frozenset({"kv_cache_block_size", "decisions_path", "decisions_limit_bytes", "shadow_policy"})


def parse_router_args(
    argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> tuple[RouterServiceSettings, RuntimeSettings]:
    """Read the settings from a command line over its environment. Nothing is reached for that: `--help` answers at once.

    Leaves the process as argparse does: status 0 after `--help`, 2 with one line after an error of use.
    """
    env = os.environ if env is None else env
    parser = CommandParser(
        "python -m dynamo.router",
        usage="python -m dynamo.router --endpoint NAMESPACE.COMPONENT.ENDPOINT [options]",
        description="Route requests to the workers of an endpoint by what they hold in their KV caches and by their load.",
    )
    add_flags(parser, (made for name, made in settings_of(RouterServiceSettings) if name not in _FRONTEND_ONLY), env)
    of_runtime = (made for _, made in settings_of(RuntimeSettings) if made.flags and made.dest not in _WORKERS_ONLY)
    add_flags(parser, of_runtime, env)
    given = vars(parser.parse_args(argv))
    try:
        settings = read_settings(RouterServiceSettings, env, given)
    except ValueError as error:
        parser.error(str(error))
    if settings.endpoint is None:
        parser.error("--endpoint is needed: the endpoint of the workers, such as prod.prefill.generate")
    return settings, RuntimeSettings.from_env(env, given)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. 0 after a clean end, 1 with one line when it could not start, 2 after an error of use."""
    configure_dynamo_logging()
    settings, of_runtime = parse_router_args(argv)
    try:
        asyncio.run(_serve(settings, of_runtime))
    except DynamoException as error:
        print(one_line(text_of(error)), file=sys.stderr)  # noqa: T201 - the last line of a process that failed is for its operator
        return 1
    except KeyboardInterrupt:  # before the signal handlers stood: nothing has begun that needs an end
        return 130
    return 0


async def _serve(settings: RouterServiceSettings, of_runtime: RuntimeSettings) -> None:
    assert settings.endpoint is not None
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, None, None, settings=of_runtime)
    try:
        async with AsyncExitStack() as stack:
            asked = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, asked.set)
                stack.callback(loop.remove_signal_handler, number)
            await runtime.start()
            endpoint = runtime.endpoint(settings.endpoint)
            kv = settings.kv
            held = PrefixIndex() if kv.reads_events else None
            router = new_router(kv, settings.block_size, policy_of(kv)[0], endpoint, held)
            workers = await stack.enter_async_context(routed_endpoint(endpoint, router, kv, held))
            await stack.enter_async_context(busy_filter(workers, settings.busy_thresholds))
            service = await stack.enter_async_context(RouterService(workers))
            logger.info("routing to the workers of %s, blocks of %d tokens", endpoint.path, settings.block_size)
            await asked.wait()
            logger.info("draining")
            await service.drain(runtime.settings.shutdown_seconds)
    finally:
        await runtime.aclose()


if __name__ == "__main__":
    sys.exit(main())

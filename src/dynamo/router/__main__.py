"""`python -m dynamo.router --endpoint ns.comp.ep`: a KV-aware router in front of the workers of any endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from dynamo.errors import DynamoException, text_of
from dynamo.kv.approximate_index import ApproximateIndex
from dynamo.kv.index import PrefixIndex
from dynamo.kv.overlap import OverlapIndex
from dynamo.router.index_feed import KvEventFeed
from dynamo.router.kv_domains import policy_of, router_options
from dynamo.router.kv_router import KvRouter
from dynamo.router.kv_settings import KvRouterSettings
from dynamo.router.load_reports import RouterLoadReports
from dynamo.router.replica_sync import ReplicaSync
from dynamo.router.service import RouterService
from dynamo.router.service_settings import RouterServiceSettings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.log_text import one_line
from dynamo.runtime.logging import configure_dynamo_logging
from dynamo.runtime.settings import RuntimeSettings
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.table import read_settings, settings_of

__all__ = ["main", "parse_router_args"]

logger = logging.getLogger(__name__)

_WORKERS_ONLY: Final = frozenset({"engine_request_limit"})  # of the runtime's flags
_FRONTEND_ONLY: Final = frozenset({"kv_cache_block_size", "decisions_path", "decisions_limit_bytes"})


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
            router = KvRouter(
                block_size=settings.block_size,
                policy=policy_of(kv)[0],
                rng=random.Random(),
                index=held if held is not None else _guesses(kv),
                predicted=_predictions(kv),
                options=router_options(kv),
            )
            service = RouterService(endpoint, router)
            if held is not None:
                await stack.enter_async_context(KvEventFeed(endpoint, held, on_trust=service.set_trust))
            await stack.enter_async_context(RouterLoadReports(endpoint, router.load))
            if kv.router_replica_sync:
                router.observer = await stack.enter_async_context(
                    ReplicaSync(
                        endpoint, router.load, router_id=runtime.connection_id(), block_size=settings.block_size
                    )
                )
            await stack.enter_async_context(service)
            logger.info("routing to the workers of %s, blocks of %d tokens", endpoint.path, settings.block_size)
            await asked.wait()
            logger.info("draining")
            await service.drain(runtime.settings.shutdown_seconds)
    finally:
        await runtime.aclose()


def _guesses(kv: KvRouterSettings) -> OverlapIndex | None:
    """Return the index of what was sent where, for workers whose KV events are not read."""
    if not kv.guesses:
        return None
    return ApproximateIndex(ttl_seconds=kv.router_ttl_secs, is_lru=kv.router_approximate_cache_policy == "lru")


def _predictions(kv: KvRouterSettings) -> OverlapIndex | None:
    """Return the index that counts a prompt's blocks as held until its worker's events say so."""
    seconds = kv.router_predicted_ttl_secs
    return ApproximateIndex(ttl_seconds=seconds) if kv.reads_events and seconds is not None else None


if __name__ == "__main__":
    sys.exit(main())

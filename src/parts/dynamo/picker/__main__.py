"""`python -m dynamo.picker`: the endpoint picker of a gateway, until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from dynamo.errors import DynamoException, InvalidArgument, text_of
from dynamo.frontend.app import Frontend
from dynamo.frontend.http.loops import event_loop_factory, spare_the_collector
from dynamo.frontend.settings import FrontendSettings
from dynamo.picker.addresses import Addresses
from dynamo.picker.choice import SHED, Picker
from dynamo.picker.server import PickerServer
from dynamo.picker.settings import MODES, PickerSettings
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.workers.busy_settings import BusySettings
from dynamo.runtime.base.settings import RuntimeSettings, SystemSettings
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.observe.log_text import one_line
from dynamo.runtime.observe.logging import configure_dynamo_logging
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.table import Setting, read_settings, settings_of

if TYPE_CHECKING:
    from dynamo.picker.pods.followed import FollowedPods

logger = logging.getLogger(__name__)

_WORKERS_ONLY: Final = frozenset({"engine_request_limit"})  # of the runtime's flags
_OF_MODELS: Final = frozenset(
    {
        "router_mode", "namespace", "namespace_prefix", "router_min_initial_workers", "max_requests_per_model",
        "max_queue_age_seconds", "custom_jinja_template", "enforce_disagg",
    }
)  # fmt: skip


def parse_picker_args(
    argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> tuple[PickerSettings, FrontendSettings]:
    """Read the settings from a command line over its environment.

    Leaves the process as argparse does: status 0 after `--help`, 2 with one line after an error of use.
    """
    env = {"DYN_ROUTER_MODE": "kv", "DYN_HTTP_OVERLOAD_STATUS_CODE": str(SHED), **(os.environ if env is None else env)}
    parser = CommandParser(
        "python -m dynamo.picker",
        usage="python -m dynamo.picker [options]",
        description="Choose the workers for the requests of a gateway (Envoy's external processing, port 9002).",
    )
    add_flags(parser, _flagged(), env)
    given = vars(parser.parse_args(argv))
    try:
        picker = read_settings(PickerSettings, env, given)
        if picker.pods.are_followed:  # vLLM takes members that the APIs here do not know
            env.setdefault("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", "1")
        frontend = FrontendSettings.from_env(env, given)
        _check(picker, frontend)
    except (ValueError, InvalidArgument) as error:
        parser.error(str(error))
    return picker, frontend


def _flagged() -> Iterator[Setting]:
    for _, made in settings_of(PickerSettings):
        yield made
    for name, made in settings_of(FrontendSettings, sections=False):
        if name in _OF_MODELS:
            yield made
    for table in (KvRouterSettings, BusySettings, RuntimeSettings):
        for _, made in settings_of(table):
            if made.dest not in _WORKERS_ONLY:
                yield made


def _check(picker: PickerSettings, frontend: FrontendSettings) -> None:
    """Refuse what a picker cannot do. Raises ValueError."""
    if frontend.router_mode not in MODES:
        raise ValueError(
            f"--router-mode {frontend.router_mode} chooses by streams that this process has open, and a picker has "
            f"none: use one of {', '.join(MODES)}"
        )
    picker.pods.check()
    if picker.epp_mode == "standalone" and not picker.pods.are_followed:
        raise ValueError(
            "DYN_EPP_MODE=standalone, plain vLLM pods, needs their list: --pods, --pods-file or --pod-selector"
        )
    if picker.pods.selector is not None and not frontend.runtime.kubernetes.pod_namespace:
        raise ValueError("--pod-selector needs the namespace of the pods: POD_NAMESPACE")
    if frontend.key_sources.exist:
        raise ValueError("keys are configured, and a picker checks none: leave that to the gateway")
    if (picker.tls_cert_path is None) != (picker.tls_key_path is None):
        raise ValueError("--tls-cert-path and --tls-key-path need each other")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. 0 after a clean end, 1 with one line when it could not start, 2 after an error of use."""
    configure_dynamo_logging()
    settings, of_frontend = parse_picker_args(argv)
    try:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(_serve(settings, of_frontend))
    except (DynamoException, OSError) as error:
        print(one_line(text_of(error)), file=sys.stderr)  # noqa: T201 - the last line of a process that failed is for its operator
        return 1
    except KeyboardInterrupt:  # before the signal handlers stood: nothing has begun that needs an end
        return 130
    return 0


async def _serve(settings: PickerSettings, of_frontend: FrontendSettings) -> None:
    loop = asyncio.get_running_loop()
    memory = "mem" if settings.pods.are_followed else None
    # A frontend has no status server, as its own port shows all of that. A picker has no other port for HTTP.
    of_runtime = replace(of_frontend.runtime, system=SystemSettings.from_env())
    runtime = DistributedRuntime(loop, memory, memory, settings=of_runtime)
    try:
        async with AsyncExitStack() as stack:
            asked = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, asked.set)
                stack.callback(loop.remove_signal_handler, number)
            frontend = await stack.enter_async_context(Frontend(of_frontend, runtime))
            addresses = Addresses(settings.target_port)
            if settings.pods.are_followed:
                addresses = await stack.enter_async_context(follow_pods(settings, of_frontend, runtime))
            picker = Picker(frontend, addresses, fallbacks=settings.fallbacks, seconds=settings.choice_seconds)
            spare_the_collector()  # what pods need has been imported now, too
            server = await stack.enter_async_context(PickerServer(picker, settings))
            logger.info("picking endpoints for gateways on %s:%d", settings.host, server.port)
            await asked.wait()
            logger.info("draining")
            await server.drain(of_frontend.graceful_shutdown_seconds)
    finally:
        await runtime.aclose()


def follow_pods(settings: PickerSettings, of_frontend: FrontendSettings, runtime: DistributedRuntime) -> FollowedPods:
    """Return the pods of plain vLLM that the settings name."""
    from dynamo.picker.pods.followed import FollowedPods  # needs ZMQ, and the client of Kubernetes
    from dynamo.picker.pods.sources import ListedPods, PodsOfFile, PodsOfKubernetes, PodSource
    from dynamo.picker.pods.worker import PodTools
    from dynamo.worker.kv_publishing.metrics import KvPublisherMetrics

    pods = settings.pods
    source: PodSource = ListedPods(pods.pods)
    if pods.file is not None:
        source = PodsOfFile(pods.file)
    elif pods.selector is not None:
        namespace = of_frontend.runtime.kubernetes.pod_namespace or ""
        source = PodsOfKubernetes(namespace, pods.selector, settings.target_port, pods.role_label)
    metrics = KvPublisherMetrics(runtime.metrics)
    return FollowedPods(source, PodTools(pods, of_frontend.namespace or "pods", metrics))


if __name__ == "__main__":
    sys.exit(main())

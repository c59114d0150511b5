"""`python -m dynamo.cli.child`: one process of `dynamo serve`. Not for people.

It ends when its parent does: standard input is a lifeline that is never written to, and its end is the parent's end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from dynamo.cli.usage import UsageError, split_engine_args
from dynamo.settings.command import EXIT_USAGE

if TYPE_CHECKING:
    from dynamo.contract.config import WorkerConfig
    from dynamo.contract.engine import BaseEngine


def main(argv: list[str] | None = None) -> int:
    """Run as a frontend or a worker; return the exit status."""
    own, rest = split_engine_args(list(sys.argv[1:] if argv is None else argv))
    parser = argparse.ArgumentParser("dynamo.cli.child")
    parser.add_argument("role", choices=("frontend", "worker"))
    parser.add_argument("--kill-after", type=float, required=True, help="seconds from the lifeline's end to SIGKILL")
    parser.add_argument("--report", type=int, required=True, help="descriptor for reports")
    parser.add_argument("--listener", type=int, action="append", help="descriptor of a bound socket of the frontend")
    parser.add_argument("--engine", default="")
    parser.add_argument("--serve-as", action="append", help="a name of the model, whatever the engine calls it")
    options = parser.parse_args(own)

    lifeline = Lifeline(options.kill_after)
    lifeline.watch()  # before the imports below: they take the better part of a second
    try:
        if options.role == "frontend":
            return _be_frontend(options.listener, rest)
        return _be_worker(options, rest, Reports(options.report), lifeline)
    finally:
        lifeline.sweep()


class Lifeline:
    """Ends this process, and its group, when the parent is gone."""

    def __init__(self, kill_after: float) -> None:
        self._kill_after = kill_after
        self._is_cut = False

    def watch(self) -> None:
        """Take standard input away from whatever runs here, and watch it from a thread."""
        watched = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        threading.Thread(target=self._wait, args=(watched,), name="lifeline", daemon=True).start()

    def _wait(self, watched: int) -> None:
        while os.read(watched, 1):
            pass  # nothing is written there; if it were, it would mean nothing
        self._is_cut = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # nothing here would sweep any more, or yet
            self.sweep()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._kill_after)
        os.killpg(0, signal.SIGKILL)

    def sweep(self) -> None:
        """End the processes that this process started: without a parent nothing else ends them."""
        if self._is_cut:
            os.killpg(0, signal.SIGKILL)

    def force_exit(self, status: int) -> None:
        """End this process at once, whatever its threads do. A parent that is there ends what is left of the group."""
        self.sweep()
        os._exit(status)


class Reports:
    """Reports to the parent, one JSON object a line, what it cannot see from outside."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, event: str, **members: Any) -> None:
        line = json.dumps({"event": event, **members}) + "\n"
        try:
            os.write(self._descriptor, line.encode())
        except BrokenPipeError:
            return  # the parent is gone, and the lifeline is about to end


def _be_frontend(listeners: list[int], argv: list[str]) -> int:
    from dynamo.frontend.__main__ import main as frontend_main

    return frontend_main(argv, listeners=[socket.socket(fileno=each) for each in listeners])


def _be_worker(options: argparse.Namespace, argv: list[str], report: Reports, lifeline: Lifeline) -> int:
    from dynamo.cli.engines import endpoint_path, load_engine, on_planes, served_as, source_directory

    engine_spec: str = options.engine
    try:
        engine_cls = load_engine(engine_spec)
    except UsageError as error:
        print(f"dynamo serve: error: {error}", file=sys.stderr)
        return EXIT_USAGE

    from dynamo.errors import DynamoException, InvalidArgument, text_of
    from dynamo.runtime.distributed import DistributedRuntime
    from dynamo.runtime.observe.log_text import one_line
    from dynamo.worker.run import exit_at_once, exit_status, run_engine

    path = ""

    async def make(args: list[str] | None) -> tuple[BaseEngine, WorkerConfig]:
        nonlocal path
        engine, config = await engine_cls.from_args(args)
        config = on_planes(config, discovery="file", requests="tcp")
        config = served_as(config, options.serve_as or ())
        path = endpoint_path(config)
        report("configured", endpoint=path, surfaces=config.endpoint_types, sources=source_directory(engine_spec))
        return engine, config

    async def serving() -> None:
        runtime = DistributedRuntime.detached()
        server = await runtime.plane_server()
        card = await runtime.endpoint(path).published_model() or {}
        report(
            "serving",
            address=str(server.transport("")["transport"]["tcp"]).partition("/")[0],
            model=card.get("display_name", ""),
            instance_id=runtime.connection_id(),
        )

    status = 0
    try:
        run_engine(engine_cls, argv, make, on_serving=serving, force_exit=lifeline.force_exit)
    except DynamoException as error:
        if isinstance(error, InvalidArgument):
            # Several workers meet the same mistake: the parent prints it once.
            report("refused", reason=one_line(str(error)))
        else:
            print(one_line(text_of(error)), file=sys.stderr)
        status = exit_status(error)
    # Another model is loaded only after this process has given its memory back.
    if engine_cls.skips_teardown or options.serve_as:
        lifeline.sweep()
        exit_at_once(status)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""How many Python calls one request costs the frontend, by module: a figure that does not depend on the machine's speed.

    python benchmarks/request_calls.py                          one-token chat requests, one at a time
    python benchmarks/request_calls.py --router-mode kv         the same with KV routing
    python benchmarks/request_calls.py --functions 40           the functions with the most calls
    python benchmarks/request_calls.py --source /other/src      beside another version of the package

A real frontend and the bench's worker run as processes of their own. `sys.setprofile` counts in the frontend between two
signals, as the interpreter does: calls of Python functions, each resumption of a coroutine or generator, and calls of C
functions (in the second column, by the module that makes them).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from model import Prompts, make_model
from stack import HERE, PATIENCE_SECONDS, cpu_seconds, free_port, processes

COUNTER: Final = """
import os, signal, sys

calls, c_calls = {}, {}

def count(frame, event, argument):
    if event == "call":
        code = frame.f_code
        calls[code] = calls.get(code, 0) + 1
    elif event == "c_call":
        key = frame.f_code, getattr(argument, "__qualname__", "?")
        c_calls[key] = c_calls.get(key, 0) + 1

def toggle(number, frame):
    if sys.getprofile() is None:
        calls.clear()
        c_calls.clear()
        sys.setprofile(count)
        with open(os.environ["CALLS_FILE"] + ".on", "w"):
            pass
        return
    sys.setprofile(None)
    import json
    with open(os.environ["CALLS_FILE"] + ".new", "w") as file:
        rows = [[code.co_filename, code.co_qualname, "", count] for code, count in calls.items()]
        rows += [[code.co_filename, code.co_qualname, name, count] for (code, name), count in c_calls.items()]
        json.dump(rows, file)
    os.replace(os.environ["CALLS_FILE"] + ".new", os.environ["CALLS_FILE"])

if os.environ.get("CALLS_FILE") and "dynamo.frontend" in " ".join(sys.orig_argv):
    signal.signal(signal.SIGUSR1, toggle)
"""


class Client:
    """One kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)

    def ask(self, body: dict[str, Any]) -> None:
        """Send one chat request and read the whole answer."""
        data = json.dumps(body)
        self._connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text[:300]!r}")


def wait_for(path: Path) -> None:
    """Wait for a file of the counted process."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"{path} did not appear")
        time.sleep(0.01)


def counted(args: argparse.Namespace, directory: Path) -> tuple[list[tuple[str, str, str, int]], float]:
    """Return the calls of `args.requests` requests, and the CPU seconds of each in a run without a profiler."""
    (directory / "sitecustomize.py").write_text(COUNTER)
    port, result = free_port(), directory / "calls.json"
    source = [str(args.source)] if args.source else []
    env = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")} | {
        "PYTHONPATH": os.pathsep.join([str(directory), *source]),
        "CALLS_FILE": str(result),
        "DYN_FILE_KV": str(directory / "store"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "DYN_LOG": "info",
    }
    model = make_model(HERE.parent / "bench-results" / "model")
    mode = ["--router-mode", args.router_mode, *args.frontend] if args.router_mode else args.frontend
    frontend = [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file", "--http-host", "127.0.0.1", "--http-port", str(port), *mode]  # fmt: skip
    worker = [sys.executable, str(HERE / "engine.py"), "--model", str(model), "--discovery-backend", "file", *args.worker]  # fmt: skip
    prompts = Prompts(model)
    seeds = iter(range(10_000_000, 20_000_000))

    def body() -> dict[str, Any]:
        message = {"role": "user", "content": prompts.text(args.tokens, next(seeds))}
        return {"model": "bench", "messages": [message], "max_tokens": args.output, "stream": args.stream}

    with processes({"frontend": frontend, "worker": worker}, port, env, directory) as running:
        client = Client(port)
        for _ in range(200):
            client.ask(body())
        costs = []
        for _ in range(5):
            bodies = [body() for _ in range(args.requests)]
            before = cpu_seconds(running.pids["frontend"])
            for one in bodies:
                client.ask(one)
            costs.append((cpu_seconds(running.pids["frontend"]) - before) / args.requests)
        os.kill(running.pids["frontend"], signal.SIGUSR1)
        wait_for(Path(f"{result}.on"))
        for _ in range(args.requests):
            client.ask(body())
        os.kill(running.pids["frontend"], signal.SIGUSR1)
        wait_for(result)
    return json.loads(result.read_text()), statistics.median(costs)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Python calls of one request in the frontend")
    parser.add_argument("--router-mode", default="")
    parser.add_argument("--source", type=Path, default=None, help="the src folder of another version of the package")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--output", type=int, default=1, help="tokens of each answer")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="print the N functions called most, too")
    parser.add_argument("--frontend", nargs="*", default=[], help="more flags of the frontend, after --")
    parser.add_argument("--worker", nargs="*", default=[], help="more flags of the worker")
    parser.add_argument("--json", type=Path, help="write calls per request by module here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        found, seconds = counted(args, Path(name))
    modules: Counter[str] = Counter()
    in_c: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for file, function, c_function, count in found:
        module = file.rpartition("/dynamo/")[2] if "/dynamo/" in file else "/".join(file.split("/")[-2:])
        (in_c if c_function else modules)[module] += count / args.requests
        functions[f"{module} {function}" + (f" -> {c_function}" if c_function else "")] += count / args.requests
    python, c = sum(modules.values()), sum(in_c.values())
    print(f"{python + c:8.0f} calls per request: {python:.0f} of Python, {c:.0f} of C; {seconds * 1e6:.0f} us of CPU")
    for module, count in (modules + in_c).most_common():
        if count >= 0.5:
            print(f"{count:8.1f} {modules[module]:6.1f} {in_c[module]:6.1f}  {module}")
    for function, count in functions.most_common(args.functions):
        print(f"{count:8.2f}   {function}")
    if args.json:
        args.json.write_text(json.dumps({"modules": modules + in_c, "functions": functions}))


if __name__ == "__main__":
    main()

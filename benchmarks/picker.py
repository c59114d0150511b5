"""What the endpoint picker adds to a request: Envoy with and without it, in turns, over mock pods.

    nice -n -10 python benchmarks/picker.py --rate 500 --seconds 5 --rounds 5

Needs Envoy (`make test-gateway` fetches it, or ENVOY names it). Envoy runs deploy/gateway/envoy.yaml, and beside its listener
another one without the picker. The load is open: requests leave at their time, whatever became of those before. Times are from
then to the last byte of an answer of one token. Processor time is that of each process over its own rounds.

    python benchmarks/picker.py --no-envoy --rate 200 --seconds 5 --rounds 5 [--duplex] [--split]

sends the picker what Envoy sends it. The time is then that of the choice. `--split` takes samples of the picker's stack beside
(`sampled.py`), and prints the share of each part.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket
from typing import Any, Final, cast

import msgspec
from envoy_calls import EnvoyCalls
from stack import end_on_sigterm

import dynamo.reference.demo
from dynamo.frontend.http.loops import event_loop_factory

REPOSITORY: Final = Path(__file__).parent.parent
BAR_MS: Final = 2.0  # that the picker may add to the 99th percentile
CONNECTIONS: Final = 64
WORDS: Final = 300  # of a prompt: 2 kB
PODS: Final = 4
_TICK: Final = os.sysconf("SC_CLK_TCK")


class MockPod(asyncio.Protocol):
    """Answers as a pod of plain vLLM does, with one token at once."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # which uvloop's are not by their class

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            found = re.search(rb"content-length: (\d+)", head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._received) < size:
                return
            path, self._received = head.split(b" ", 2)[1], self._received[size:]
            body = ANSWERS.get(path, COMPLETION)
            assert self._transport is not None
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
                len(body), body
            ))  # fmt: skip


COMPLETION: Final = b'{"id":"1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}]}'
ANSWERS: dict[bytes, bytes] = {
    b"/health": b"",
    b"/metrics": b'vllm:num_requests_running{} 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1\n',
}


async def serve_pods(ports: list[int], root: str) -> None:
    """Be the mock pods, until killed."""
    model = {"id": "m", "root": root, "max_model_len": 32768}
    ANSWERS[b"/v1/models"] = json.dumps({"data": [model]}).encode()
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(MockPod, "127.0.0.1", port)
    await asyncio.Event().wait()


class Caller(asyncio.Protocol):
    """One connection of the load, with one request at a time."""

    def __init__(self, answered: Callable[[Caller, int], None]) -> None:
        """`answered` is called with each status; 0: the connection was lost."""
        self._answered = answered
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self.due: float | None = None  # when its request was to leave; None: it has none

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # which uvloop's are not by their class

    def send(self, request: bytes, due: float) -> None:
        """Send a request."""
        assert self._transport is not None
        self._received, self.due = b"", due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: (\d+)", self._received[:end]) if end >= 0 else None
        if end < 0 or self.due is None:
            return
        is_whole = (
            self._received.endswith(b"0\r\n\r\n") if found is None else len(self._received) >= end + 4 + int(found[1])
        )
        if is_whole:
            self._answered(self, int(self._received[9:12]))

    def connection_lost(self, error: Exception | None) -> None:
        if self.due is not None:
            self._answered(self, 0)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


def body_of(number: int) -> bytes:
    """One of a hundred prompts that begin alike, so that the choice has something to find."""
    prompt = f"{number % 100} " + "words " * WORDS + str(number)
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()


def request_of(number: int) -> bytes:
    """Return the request of a number."""
    body = body_of(number)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def offer(port: int, rate: float, seconds: float, first: int) -> tuple[list[float], dict[int, int]]:
    """Send requests at a rate; return how long each took in ms, and how many had each status."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    count, times, statuses = int(rate * seconds), list[float](), dict[int, int]()
    requests = [request_of(first + number) for number in range(count)]
    sent = 0

    def answered(caller: Caller, status: int) -> None:
        assert caller.due is not None
        times.append((time.perf_counter() - caller.due) * 1000)
        statuses[status] = statuses.get(status, 0) + 1
        caller.due = None
        idle.append(caller)
        if len(times) == count:
            done.set()
        elif sent < count and began + sent / rate <= time.perf_counter():
            tick()  # it has waited for a connection

    def tick() -> None:
        """Send what is due."""
        nonlocal sent
        while sent < count and idle and (due := began + sent / rate) <= time.perf_counter():
            sent += 1
            idle.pop().send(requests[sent - 1], due)

    idle = [(await loop.create_connection(lambda: Caller(answered), "127.0.0.1", port))[1] for _ in range(CONNECTIONS)]
    callers, began = list(idle), time.perf_counter() + 0.1
    # By a signal: the timers of a loop are as coarse as what is measured, a millisecond.
    loop.add_signal_handler(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 1 / rate)
    await done.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    loop.remove_signal_handler(signal.SIGALRM)
    for caller in callers:
        caller.close()
    return times, statuses


async def answers(port: int) -> bool:
    """Return whether requests are served: everything has started."""
    try:
        return (await offer(port, 50, 0.1, 0))[1].keys() == {200}
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket(AF_INET, SOCK_STREAM)) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def envoy_configuration(
    with_picker: int, without: int, picker: int, pods: list[int], *, duplex: bool, skips_answers: bool
) -> str:
    """Return deploy/gateway/envoy.yaml at these ports, with a second listener that calls no picker."""
    found: Any = msgspec.yaml.decode((REPOSITORY / "deploy" / "gateway" / "envoy.yaml").read_bytes())
    resources = found["static_resources"]
    (listener,) = resources["listeners"]
    plain = copy.deepcopy(listener)
    for each, port in ((listener, with_picker), (plain, without)):
        each["name"] = f"on_{port}"
        each["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    manager = plain["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [each for each in manager["http_filters"] if "ext_proc" not in each["name"]]
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    mode = next(each for each in filters if "ext_proc" in each["name"])["typed_config"]["processing_mode"]
    if skips_answers:
        mode["response_header_mode"] = "SKIP"
    if duplex:
        mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
        mode |= {"response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"}
    resources["listeners"] = [listener, plain]
    for cluster in resources["clusters"]:
        ports = pods if cluster["name"] == "pool" else [picker]
        hosts = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
            for port in ports
        ]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
    return json.dumps(found)


@contextmanager
def process(argv: list[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and end it, also where SIGTERM ends this one."""
    end_on_sigterm()
    made = subprocess.Popen(argv, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield made
    finally:
        made.send_signal(signal.SIGTERM)
        try:
            made.wait(20)
        except subprocess.TimeoutExpired:
            made.kill()
            made.wait()


def metrics(port: int) -> str:
    """Return the metrics of the picker; nothing: it has not started."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def choices(text: str) -> int:
    """Return how many choices the picker has made."""
    found = re.search(r"dynamo_picker_choice_seconds_count\S* ([0-9.e+]+)", text)
    return 0 if found is None else int(float(found[1]))


def histogram(text: str) -> str:
    """Return the picker's own account of its choices."""
    buckets = [(float(bound), int(float(count))) for bound, count in re.findall(
        r'dynamo_picker_choice_seconds_bucket\{.*?le="([^"+]+)".*?\} ([0-9.e+]+)', text
    )]  # fmt: skip
    total = max(choices(text), 1)
    shares = "  ".join(f"<={bound * 1000:g} ms {count / total:.1%}" for bound, count in buckets if bound <= 0.01)
    return f"the picker's own histogram of {total} choices: {shares}"


def quantile(times: list[float], share: float) -> float:
    """Return a quantile of the times."""
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


async def measure(options: argparse.Namespace, ports: list[int], pids: dict[str, int]) -> int:
    """Offer the load in turns; 1: the bar was missed."""
    with_picker, without, _, system = ports
    found: dict[str, list[list[float]]] = {"without": [], "with": []}
    cpu: dict[tuple[str, str], list[float]] = {}
    async with asyncio.timeout(60):
        while not (await answers(with_picker) and choices(metrics(system))):  # Envoy serves without a picker, too
            await asyncio.sleep(0.2)
    await offer(with_picker, options.rate / 2, 1, 0)
    gc.disable()  # a search of the load's own thousands of tasks would count as time of the requests that wait meanwhile
    for number in range(options.rounds):
        for which, port in (("without", without), ("with", with_picker)):
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            times, statuses = await offer(port, options.rate, options.seconds, number * 10_000)
            for name, pid in pids.items():
                cpu.setdefault((name, which), []).append((cpu_seconds(pid) - before[name]) / len(times) * 1e6)
            found[which].append(times)
            print(
                f"round {number + 1}, {which:7} picker: p50 {quantile(times, 0.5):6.2f} ms, p99 {quantile(times, 0.99):7.2f} ms, "
                f"statuses {statuses}"
            )
    added = {
        share: [quantile(b, share) - quantile(a, share) for a, b in zip(found["without"], found["with"], strict=True)]
        for share in (0.5, 0.99)
    }
    for name in pids:
        text = ", ".join(f"{which} {statistics.median(cpu[name, which]):.0f}" for which in ("without", "with"))
        print(f"processor time of {name}, us a request: {text}")
    print(histogram(metrics(system)))
    p50, p99 = statistics.median(added[0.5]), statistics.median(added[0.99])
    print(
        f"added at {options.rate:g} requests/s, median of {options.rounds} pairs: p50 {p50:+.2f} ms, p99 {p99:+.2f} ms "
        f"(least p99 {min(added[0.99]):+.2f}), bar {BAR_MS:g} ms"
    )
    return int(p99 > BAR_MS)


# -- without Envoy -----------------------------------------------------------------------------------------------------


async def offer_calls(calls: EnvoyCalls, options: argparse.Namespace, seconds: float, first: int) -> list[float]:
    """Send calls at a rate; return how long each choice took in ms."""
    count, began = int(options.rate * seconds), time.perf_counter() + 0.1

    async def one(number: int) -> float:
        await asyncio.sleep(began + number / options.rate - time.perf_counter())
        call = await calls.send(number, body_of(first + number), duplex=options.duplex)
        return 0.0 if call is None else call.chosen_after * 1000

    return [each for each in await asyncio.gather(*(one(number) for number in range(count))) if each]


async def measure_calls(options: argparse.Namespace, port: int, pid: int) -> int:
    """Offer calls in rounds, and print what each cost the picker."""
    loop, found = asyncio.get_running_loop(), list[float]()
    async with asyncio.timeout(60):
        while True:
            with suppress(OSError):
                _, calls = await loop.create_connection(EnvoyCalls, "127.0.0.1", port)
                if await calls.send(0, body_of(0), duplex=options.duplex) is not None:
                    break
                calls.close()
            await asyncio.sleep(0.2)
    await offer_calls(calls, options, 1, 0)
    began = cpu_seconds(pid)
    await asyncio.sleep(options.seconds)
    idle = (cpu_seconds(pid) - began) / options.seconds
    for number in range(options.rounds):
        began = cpu_seconds(pid)
        times = await offer_calls(calls, options, options.seconds, number * 10_000)
        found.append(((cpu_seconds(pid) - began) - idle * options.seconds) / len(times) * 1e6)
        print(
            f"round {number + 1}: {len(times)} choices, p50 {quantile(times, 0.5):6.2f} ms, p99 {quantile(times, 0.99):7.2f} ms, "
            f"{found[-1]:.0f} us of processor time each"
        )
    calls.close()
    print(
        f"processor time of the picker at {options.rate:g} requests/s: best {min(found):.0f}, median {statistics.median(found):.0f} us "
        f"a request; beside them {idle * 1000:.0f} ms a second for its pods"
    )
    return 0


# Where the time of a request goes, by the innermost file of the package; the first that matches.
PARTS: Final = (
    ("HPACK", "picker/grpc/hpack"), ("HTTP/2 and gRPC", "picker/grpc/"), ("messages", "picker/messages|picker/wire"),
    ("exchange, booking", "picker/exchange|picker/bookings|picker/server"), ("pods", "picker/pods|runtime/http"),
    ("addresses and choice of the picker", "picker/choice|picker/addresses|picker/prefill"),
    ("tokenizer", "dynamo/text/tokenizer"), ("template and cache of prompts", "dynamo/text/"),
    ("reading and checks", "frontend/pipeline|protocol/|frontend/apis"),
    ("hashes and index of blocks", "dynamo/kv/"), ("router and policies", "dynamo/router|dynamo/placement"),
    ("the rest of the frontend", "dynamo/frontend"), ("runtime and metrics", "dynamo/runtime"),
)  # fmt: skip


def print_split(file: Path) -> None:
    """Print the share of each part, but for the start of the process."""
    parts, total = dict[str, int](), 0
    for stack, count in json.loads(file.read_bytes()):
        if not any(function == "_serve" or "picker/grpc" in path or "asyncio/" in path for path, function in stack):
            continue  # imports
        part = next((name for path, _ in stack for name, pattern in PARTS if re.search(pattern, path)), "the loop")
        parts[part] = parts.get(part, 0) + count
        total += count
    for part, count in sorted(parts.items(), key=lambda each: -each[1]):
        print(f"{part:36} {count / total:6.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duplex", action="store_true", help="full duplex in place of buffered bodies")
    parser.add_argument("--skip-answers", action="store_true", help="the picker gets no headers of answers")
    parser.add_argument(
        "--no-envoy", action="store_true", help="send the picker what Envoy sends, and measure it alone"
    )
    parser.add_argument("--split", action="store_true", help="with --no-envoy: where the time goes")
    parser.add_argument("--pods", type=int, default=PODS)
    parser.add_argument("--serve-pods", help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = str(dynamo.reference.demo.DIRECTORY)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        if options.serve_pods:
            runner.run(serve_pods([int(port) for port in options.serve_pods.split(",")], root))
        own = REPOSITORY / ".clients" / "gateway" / "bin" / "envoy"
        envoy = os.environ.get("ENVOY") or (str(own) if own.exists() else shutil.which("envoy"))
        if envoy is None and not options.no_envoy:
            print("Envoy is not here: make test-gateway fetches it")
            return 0
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            with_picker, without, port, system, *pods = free_ports(4 + options.pods)
            file, profile = Path(folder) / "envoy.json", Path(folder) / "profile"
            modes = {"duplex": options.duplex, "skips_answers": options.skip_answers}
            file.write_text(envoy_configuration(with_picker, without, port, pods, **modes))
            listed = ",".join(map(str, pods))
            stack.enter_context(process([sys.executable, __file__, "--serve-pods", listed]))
            argv = [
                sys.executable,
                *([str(REPOSITORY / "benchmarks" / "sampled.py"), str(profile)] if options.split else ["-m"]),
                "dynamo.picker",
            ]
            argv += ["--host", "127.0.0.1", "--port", str(port), "--pod-event-port", "0"]
            argv += ["--pods", ",".join(f"127.0.0.1:{each}" for each in pods)]
            with process(argv, DYN_SYSTEM_PORT=str(system)) as picker:
                if envoy is not None and not options.no_envoy:
                    argv = [envoy, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
                    pids = {"the picker": picker.pid, "Envoy": stack.enter_context(process(argv)).pid}
                    return runner.run(measure(options, [with_picker, without, port, system], pids))
                ended = runner.run(measure_calls(options, port, picker.pid))
            if options.split:
                print_split(profile)
            return ended


if __name__ == "__main__":
    sys.exit(main())

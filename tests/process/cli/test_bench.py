"""`dynamo bench` against a server on a real socket: a small HTTP server that answers as the test wants."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.cli.bench.answers import AnswerReader, BadAnswer, StreamMeter
from dynamo.cli.bench.command import progress_text
from dynamo.cli.bench.connections import Prepared
from dynamo.cli.bench.html import html_report
from dynamo.cli.bench.load import Load
from dynamo.cli.bench.options import read_options
from dynamo.cli.bench.prompts import GeneratedPrompts, Length, ListedPrompts, WordCost
from dynamo.cli.bench.results import results_of
from dynamo.cli.bench.samples import BUCKETS, MAX_FAILURE_KINDS, MAX_INTERVALS, Recorder, SampleHistogram, Timeline
from dynamo.cli.bench.schedule import Shape, arrival_times
from dynamo.cli.bench.table import latency_rows, remarks
from dynamo.cli.bench.targets import Target
from dynamo.cli.main import main
from support.patience import PATIENCE_SECONDS

# -- the server of these tests -------------------------------------------------------------------------------------------

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Any]  # (body, writer) -> awaitable; sends the whole answer


def whole(status: int, body: bytes, *headers: bytes) -> bytes:
    more = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (status, more, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streamed(tokens: int, prompt_tokens: int = 5, *, end: bytes = b"data: [DONE]\n\n") -> list[bytes]:
    """The pieces of an answer, as a server writes them."""
    events = [b'data: {"choices":[{"delta":{"content":"","role":"assistant"}}]}\n\n']
    events += [b'data: {"choices":[{"delta":{"content":"w%d \\"content\\":\\" "}}]}\n\n' % n for n in range(tokens)]
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":9}' % (prompt_tokens, tokens)
    events.append(b'data: {"choices":[],"usage":%b}\n\n' % usage + end)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *map(chunk, events), b"0\r\n\r\n"]


async def proper(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Streams or not, as asked; a word is a token, and the template has three."""
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    prompt_tokens = 3 + 2 * len(text.split())
    if not body.get("stream"):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}
        writer.write(whole(200, json.dumps({"usage": usage}).encode()))
        return
    for piece in streamed(body["max_tokens"], prompt_tokens):
        writer.write(piece)
        await asyncio.sleep(0)


class Server:
    """Keeps what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies = answer, list[tuple[str, dict[str, Any]]]()
        self.url = ""
        self.ready = threading.Event()

    async def run(self) -> None:
        self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        self.ready.set()
        await self.stopped.wait()
        listener.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    writer.write(whole(200, b'{"data":[{"id":"served"},{"id":"other"}]}'))
                    continue
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append((head.split()[1].decode(), body))
                await self.answer(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # a cancelled handler would be reported as a failure of the loop
        finally:
            writer.transport.abort()


@contextmanager
def serving(answer: Answer = proper) -> Iterator[Server]:
    """In a thread of its own: the command under test has the main one."""
    server = Server(answer)
    thread = threading.Thread(target=lambda: asyncio.run(server.run()))
    thread.start()
    assert server.ready.wait(10)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.stopped.set)
        thread.join()


def bench(*argv: str) -> int:
    try:
        return main(["bench", *argv])
    except SystemExit as leaving:
        return int(str(leaving.code))


def figures(tmp_path: Path, *argv: str, status: int = 0) -> Any:
    assert bench(*argv, "--json", str(tmp_path / "r.json")) == status
    return json.loads((tmp_path / "r.json").read_text())


# -- the command ---------------------------------------------------------------------------------------------------------


def test_a_closed_loop_sends_exactly_the_requests_it_was_told_to_over_its_connections(tmp_path: Path) -> None:
    with serving() as server:
        found = figures(tmp_path, server.url, "--requests", "50", "--concurrency", "4", "--output-tokens", "6")
    assert (found["sent"], found["answered"], found["failed"], found["output_tokens"]) == (50, 50, 0, 300)
    assert found["connections"] == 4
    assert found["latency_ms"]["ttft"]["samples"] == found["latency_ms"]["e2e"]["samples"] == 50
    path, body = server.bodies[-1]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["stream"], body["stream_options"]) == ("served", True, {"include_usage": True})


def test_generated_prompts_have_the_asked_length_in_the_servers_own_tokens(tmp_path: Path) -> None:
    with serving() as server:
        found = figures(tmp_path, server.url, "--requests", "5", "--input-tokens", "203")
    assert found["mean_input_tokens"] == 203  # 100 words of two tokens, and three of the template


def test_an_open_loop_keeps_its_rate_and_its_seed(tmp_path: Path) -> None:
    argv = ("--rate", "200", "--requests", "60", "--no-stream", "--seed", "3", "--model", "a", "--model", "b")
    with serving() as server:
        found = figures(tmp_path, server.url, *argv, "--endpoint", "chat", "--endpoint", "completions", "--constant")
        probes = len(server.bodies) - 60
        asked = [(path, body["model"]) for path, body in server.bodies[probes:]]
    # A latency runs from when a request was due: it holds what a busy machine makes late.
    slowest = found["latency_ms"]["e2e"]["max"] / 1000
    assert 59 / 200 - 0.01 < found["seconds"] < 59 / 200 + slowest + 0.1
    assert found["answered"] == 60
    assert len(set(asked)) == 4, "every model on every endpoint"


def test_the_first_answer_decides_nothing_when_every_request_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(whole(429, b'{"error":{"message":"too\\nmany","type":"overloaded"}}'))

    with serving(refuse) as server:
        found = figures(tmp_path, server.url, "--requests", "7", status=1)
    assert found["failures"] == [{"kind": "HTTP 429", "count": 7, "example": "too many"}]
    assert "HTTP 429" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        (streamed(3, end=b'data: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n'), "error in the stream"),
        (streamed(3, end=b""), "stream without [DONE]"),
        (streamed(3)[:3], "connection lost"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "not HTTP"),
    ],
)  # fmt: skip
def test_failures_are_told_apart(pieces: list[bytes], kind: str, tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(pieces))
        if kind != "not HTTP":
            await writer.drain()
            writer.close()

    with serving(answer) as server:
        found = figures(tmp_path, server.url, "--requests", "2", "--model", "m", status=1)
    assert [(failure["kind"], failure["count"]) for failure in found["failures"]] == [(kind, 2)]


def test_a_server_that_closes_every_connection_is_reached_again_each_time(tmp_path: Path) -> None:
    async def once(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, b'{"usage":{"completion_tokens":1}}'))
        writer.close()  # without having said so: the next request finds a dead connection

    with serving(once) as server:
        found = figures(tmp_path, server.url, "--requests", "10", "--concurrency", "2", "--no-stream", "--model", "m")
    assert (found["answered"], found["failed"]) == (10, 0)


def test_a_request_without_an_answer_is_given_up(tmp_path: Path) -> None:
    async def never(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    with serving(never) as server:
        prompts = tmp_path / "p"
        prompts.write_text("hi\n")
        found = figures(
            tmp_path, server.url, "--requests", "2", "--timeout", "0.2", "--model", "m", "--prompts", str(prompts),
            status=1,
        )  # fmt: skip
    assert [failure["kind"] for failure in found["failures"]] == ["timeout after 0.2 s"]


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as gone:
        pass
    assert bench(gone.url) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "ConnectionRefusedError" in said.err


def test_warm_up_is_sent_and_not_reported(tmp_path: Path) -> None:
    with serving() as server:
        found = figures(tmp_path, server.url, "--requests", "5", "--warmup", "8", "--model", "m")
    assert found["sent"] == 5
    assert len(server.bodies) == 2 + 8 + 5  # the two that measure our words, too


def test_several_servers_share_the_load_and_a_trailing_v1_is_understood(tmp_path: Path) -> None:
    with serving() as one, serving() as two:
        figures(tmp_path, one.url + "/v1", two.url, "--requests", "20", "--concurrency", "2", "--model", "m")
    # In a closed loop a connection keeps to its server, so the faster of the two answers more.
    assert one.bodies
    assert two.bodies
    assert len(one.bodies) + len(two.bodies) >= 20


def test_prompts_of_a_file_are_asked_in_turn(tmp_path: Path) -> None:
    listed = tmp_path / "p.jsonl"
    listed.write_text('{"prompt": "one", "output_tokens": 2}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    with serving() as server:
        argv = ("--requests", "4", "--concurrency", "1", "--model", "m", "--body", '{"temperature": 0}')
        figures(tmp_path, server.url, *argv, "--prompts", str(listed), "--header", "Authorization: Bearer x")
    asked = [(body["messages"][0]["content"], body["max_tokens"], body["temperature"]) for _, body in server.bodies]
    assert asked == [("one", 2, 0), ("two", 128, 0)] * 2
    assert "Bearer" not in (tmp_path / "r.json").read_text()


def test_ctrl_c_reports_what_there_is(tmp_path: Path) -> None:
    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for piece in streamed(10_000)[:-1]:
            writer.write(piece)
            await asyncio.sleep(0.001)

    with serving(slow) as server:
        command = [sys.executable, "-m", "dynamo.cli.main", "bench", server.url, "--model", "m", "--duration", "60"]
        (tmp_path / "p").write_text("hi\n")
        running = subprocess.Popen([*command, "--prompts", "p"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        while len(server.bodies) < 16:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=20)
    assert running.returncode == 130
    assert "16 cut by the interruption" in out
    assert "Interrupted: these are the figures up to then." in out


def test_the_line_that_lives_is_for_terminals_only(tmp_path: Path) -> None:
    with serving() as server:
        command = [sys.executable, "-m", "dynamo.cli.main", "bench", server.url, "--rate", "20", "--duration", "1.2"]
        ours, theirs = pty.openpty()
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=30, check=True)
            shown = os.read(ours, 100_000).decode()
        finally:
            os.close(ours)
            os.close(theirs)
        silent = subprocess.run([*command[:-1], "0.6"], capture_output=True, timeout=30, check=True)
    assert "in flight" in shown
    assert shown.endswith("\r\x1b[K")
    assert b"requests/s" in done.stdout
    assert silent.stderr == b""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: URL"),
        (["ftp://x"], "'ftp://x' is not a server's URL"),
        (["http://x:99999"], "is not a server's URL"),
        (["http://x", "--rate", "1", "--concurrency", "2"], "--rate and --concurrency exclude each other"),
        (["http://x", "--rate", "-1"], "--rate: -1 is not above 0"),
        (["http://x", "--rate", "nan"], "--rate: 'nan' is not a number"),
        (["http://x", "--constant"], "belong to an open loop"),
        (["http://x", "--requests", "0"], "--requests: 0 is out of range: use 1 to 1000000000000"),
        (["http://x", "--input-tokens", "5,x"], "--input-tokens: '5,x' is not a length"),
        (["http://x", "--output-tokens", "0"], "--output-tokens: '0' is not a length"),
        (["http://x", "--shared-prefix-tokens", "128"], "must be less than --input-tokens"),
        (["http://x", "--prefix-groups", "2"], "--prefix-groups needs --shared-prefix-tokens"),
        (["http://x", "--prompts", "/nowhere"], "--prompts /nowhere: No such file"),
        (["http://x", "--prompts", "/nowhere", "--input-tokens", "3"], "brings its own prompts"),
        (["http://x", "--body", "[1]"], "--body: not a JSON object"),
        (["http://x", "--body", "{"], "--body: not JSON"),
        (["http://x", "--header", "nonsense"], "--header: 'nonsense' is not a header"),
        (["http://x", "--json", "/nowhere/r.json"], "--json: cannot write /nowhere/r.json"),
        (["http://x", "--endpoint", "embeddings"], "--endpoint: 'embeddings' is unknown; use one of chat, completions"),
    ],
)
def test_an_error_of_use_is_one_line_and_status_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*argv) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert words in said.err


def test_a_prompt_file_that_says_nothing_usable_is_refused_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "p.jsonl"
    for text, words in (
        ('{"prompt": "x"}\n{"prompt": 3}\n', "line 2"),
        ("\n", "has no prompt"),
        ('{"prompt": "x", "output_tokens": 0}', "line 1: output_tokens"),
    ):
        listed.write_text(text)
        assert bench("http://x", "--prompts", str(listed)) == 2
        assert words in capsys.readouterr().err
    listed.write_text('{"messages": []}')
    assert bench("http://x", "--prompts", str(listed), "--endpoint", "completions") == 2


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--help") == 0
    assert "example:\n  dynamo bench http://127.0.0.1:8000" in capsys.readouterr().out


# -- reading answers -----------------------------------------------------------------------------------------------------

WIRE = b"".join(streamed(4, prompt_tokens=17))


def read(*pieces: bytes) -> tuple[StreamMeter, AnswerReader, bytes]:
    reader, meter, body = AnswerReader(), StreamMeter(), b""
    for piece in filter(None, pieces):
        part = reader.feed(piece)
        body += part
        if part:
            meter.feed(part)
    return meter, reader, body


@pytest.mark.parametrize("cut", range(len(WIRE) + 1))
def test_an_answer_survives_any_split(cut: int) -> None:
    meter, reader, body = read(WIRE[:cut], WIRE[cut:])
    _, _, expected = read(WIRE)
    assert (body, reader.is_complete, reader.status, reader.keeps_alive) == (expected, True, 200, True)
    assert (meter.text_events, meter.usage, meter.failure) == (4, (17, 4), None)


@given(cuts=st.sets(st.integers(1, len(WIRE) - 1), max_size=40))
def test_an_answer_survives_any_splits(cuts: set[int]) -> None:
    at = [0, *sorted(cuts), len(WIRE)]
    meter, reader, _ = read(*(WIRE[a:b] for a, b in pairwise(at)))
    assert (meter.text_events, meter.usage, meter.failure, reader.is_complete) == (4, (17, 4), None, True)


def test_a_body_ends_with_its_length_or_with_the_connection() -> None:
    *_, reader, body = read(b"HTTP/1.1 100 Continue\r\n\r\n" + whole(200, b"abc", b"Connection: close"))
    assert (body, reader.is_complete, reader.keeps_alive) == (b"abc", True, False)
    *_, reader, body = read(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert (body, reader.is_complete) == (b"abc", False)
    assert reader.end()
    *_, reader, _ = read(WIRE[:-3])
    assert not reader.end()
    *_, reader, body = read(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (body, reader.is_complete) == (b"", True)


@pytest.mark.parametrize(
    "wire",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"x" * 5000,
        b"x" * 70_000,
    ],
)
def test_what_is_no_answer_is_refused(wire: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(wire)


@pytest.mark.parametrize("key", ["content", "reasoning_content", "text"])
@pytest.mark.parametrize("space", ["", " "])
def test_text_is_seen_in_every_spelling(key: str, space: str) -> None:
    meter = StreamMeter()
    first = f'data: {{"choices":[{{"{key}":{space}"a"}}]}}\n\n'.encode()
    assert [meter.feed(first), meter.feed(b": keep-alive\n\n"), meter.feed(first * 2)] == [1, 0, 2]


# -- what is remembered --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 5000), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_within_half_a_percent(samples: list[float], q: float) -> None:
    found = SampleHistogram()
    for sample in samples:
        found.add(sample)
    exact = sorted(samples)[max(1, -int(-q * len(samples) // 1)) - 1]
    assert found.quantile(q) == pytest.approx(exact, rel=0.0051)
    assert found.highest == max(samples)


def test_a_histogram_takes_anything_and_stays_as_large_as_it_is() -> None:
    found = SampleHistogram()
    for sample in (0.0, -1.0, 1e-9, 1e9):
        found.add(sample)
    assert (found.count, len(found._counts), found.quantile(1.0)) == (4, BUCKETS, pytest.approx(5600, rel=0.01))
    assert list(found.cumulative())[-1][1] == 1.0


def test_a_timeline_is_bounded_and_loses_nothing() -> None:
    timeline = Timeline(0.25)
    for second in range(5000):
        timeline.at(second).answered += 1
    assert len(timeline.intervals) <= MAX_INTERVALS
    assert sum(interval.answered for interval in timeline.intervals) == 5000


def test_kinds_of_failures_are_bounded() -> None:
    recorder = Recorder()
    for number in range(1000):
        recorder.fail(f"kind {number}", "", 0.0)
    assert len(recorder.failures) == MAX_FAILURE_KINDS + 1
    assert recorder.failed == 1000


def test_arrivals_are_poisson_or_even() -> None:
    even = arrival_times(10, random.Random(0), is_even=True)
    assert [next(even) for _ in range(3)] == pytest.approx([0, 0.1, 0.2])
    one, other = arrival_times(10, random.Random(1)), arrival_times(10, random.Random(1))
    times = [next(one) for _ in range(2000)]
    assert times == [next(other) for _ in range(2000)]
    assert times[-1] == pytest.approx(200, rel=0.1)


def test_groups_share_their_beginning_and_nothing_else() -> None:
    prompts = GeneratedPrompts(Length(60), prefix_tokens=40, groups=3, seed=0)
    texts = [prompts.draw(n, random.Random(n), WordCost()).members["prompt"].split() for n in range(50)]
    assert {len(text) for text in texts} == {60}
    assert len({tuple(text[:40]) for text in texts}) == 3
    assert len({tuple(text[40:]) for text in texts}) == 50


def test_lengths_vary_as_told() -> None:
    rng = random.Random(0)
    drawn = [Length.of("100,20").draw(rng) for _ in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(100, rel=0.03)
    assert min(Length(1, 50).draw(rng) for _ in range(200)) == 1
    assert {Length.of("7").draw(rng) for _ in range(10)} == {7}


def test_a_busy_load_generator_says_so() -> None:
    recorder = Recorder(begun=0.0, ended=10.0, answered=1, output_tokens=100)
    assert [list(remarks(results_of(recorder, {}, cpu, False))) for cpu in (7.9,)] == [[]]
    (remark,) = remarks(results_of(recorder, {}, 8.5, False))
    assert remark.startswith("The load generator was the bottleneck: it used 85 % of one core")


def test_the_last_interval_ends_with_the_run_and_one_without_a_sample_has_no_latency() -> None:
    recorder = Recorder()
    recorder.begun, recorder.ended = 0.0, 0.6
    for at in (0.1, 0.4, 0.55):
        recorder.timeline.at(at).answered += 10
    recorder.timeline.at(0.1).first_tokens, recorder.timeline.at(0.1).first_token_total = 2, 0.01
    timeline = results_of(recorder, {}, 0.1, False)["timeline"]
    assert [row["seconds"] for row in timeline] == [0.25, 0.25, 0.1]
    assert [row["mean_ttft_ms"] for row in timeline] == [5.0, None, None]


def test_the_html_report_is_one_file_with_plots_and_escapes_what_it_was_told() -> None:
    recorder = Recorder(begun=0.0, ended=2.0, answered=2)
    for seconds in (0.01, 0.1, 1.0):
        recorder.first_token.add(seconds)
        recorder.timeline.at(seconds).answered += 1
    recorder.fail("HTTP 500", "<script>alert(1)</script>", 1.0)
    page = html_report(results_of(recorder, {"url": ["<b>"]}, 0.1, False), recorder)
    assert page.count("<svg") == page.count("</svg>") >= 3
    assert "<script" not in page
    assert not any(word in page for word in ("http://", "https://", "src=", "href="))


def test_the_progress_line_fits_a_terminal() -> None:
    recorder = Recorder(answered=12_345, output_tokens=10**7)
    recorder.first_token.add(0.5)
    assert len(progress_text(recorder, Shape(1, requests=10**6, seconds=3600), 1800.0, 256)) < 120


def test_a_table_row_is_left_out_when_it_has_no_samples() -> None:
    assert latency_rows(results_of(Recorder(), {}, 0.0, False)) == []


def test_settings_and_prompts_of_a_text_file(tmp_path: Path) -> None:
    listed = tmp_path / "p.txt"
    listed.write_text("one\ntwo\n")
    options = read_options(["http://x", "--prompts", str(listed), "--rate", "2"])
    assert isinstance(options.prompts, ListedPrompts)
    assert (options.shape.rate, options.shape.seconds, options.targets[0].url) == (2.0, 30.0, "http://x:80")


async def test_open_loop_requests_that_find_no_connection_wait_and_count_from_their_time() -> None:
    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(whole(200, b"{}"))

    with serving(slow) as server:
        target, recorder = Target.of(server.url), Recorder()
        request = Prepared(target.post("/x", {}), False)
        shape = Shape(1, requests=10, rate=1000, is_even=True)
        await Load([target], lambda number, index: request, shape, recorder).run()
    assert (recorder.answered, recorder.connections, recorder.late.count) == (10, 1, 10)
    assert recorder.whole.highest > 0.15  # the last one waited for nine others


async def test_a_connection_that_idles_at_one_server_makes_room_for_another() -> None:
    with serving() as one, serving() as two:
        targets, recorder = [Target.of(one.url), Target.of(two.url)], Recorder()
        body = {"prompt": "x", "max_tokens": 1}
        shape = Shape(1, requests=6, rate=50, is_even=True)
        source = lambda number, index: Prepared(targets[index].post("/x", body), False)  # noqa: E731
        async with asyncio.timeout(PATIENCE_SECONDS):
            await Load(targets, source, shape, recorder).run()
    assert (recorder.answered, len(one.bodies), len(two.bodies)) == (6, 3, 3)


def test_make_bench_knows_its_cases() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "bench.py"
    done = subprocess.run([sys.executable, str(script), "--only", "no such case"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'paced, 64 streams, 128 tokens'" in done.stderr

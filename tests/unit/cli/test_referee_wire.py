"""`dynamo conformance worker` over a worker with one named fault each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from dynamo.cli.main import main as dynamo
from dynamo.cli.referee import report
from dynamo.cli.referee.checks import Cause, CheckOutcome, Result
from dynamo.cli.referee.wire.command import WireFlags, all_checks, find_wires, judge, made_run, main
from dynamo.cli.referee.wire.run import WIRES
from dynamo.cli.usage import UsageError
from support.faulty_worker import FaultyWorker, faulty_worker
from support.patience import PATIENCE_SECONDS

SECRET = b"a secret of the tests"

# A fault, the check that finds it, and a part of the reason.
FAULTS = {
    "HELLO without a version": ("mux.hello", "`version` of HELLO is None"),
    "version echoed": ("mux.hello.lower-version", "answered with 99"),
    "unknown keys refused": ("mux.hello.unknown-keys", "an unknown key"),
    "frames behind HELLO dropped": ("mux.hello.not-awaited", "END did not come"),
    "first frame unchecked": ("mux.hello.first", "ERROR for a first frame"),
    "malformed HELLO taken": ("mux.hello.malformed", "ERROR for HELLO with c1"),
    "version 0 taken": ("mux.hello.version-refused", "ERROR for version 0"),
    "no HELLO timer": ("mux.hello.missing", "the end of the connection did not come"),
    "reserved is 7": ("mux.frames.form", "has 7 where 0 is reserved"),
    "a read is a frame": ("mux.frames.split", "END did not come"),
    "unknown kind refused": ("mux.frames.unknown-kind", "kind 200 is not known"),
    "long frames awaited": ("mux.frames.too-long", "ERROR for a frame of 65537 bytes did not come"),
    "PONG with other bytes": ("mux.ping", "is answered with fe7f80c103020100"),
    "reading stops while a stream stalls": ("mux.ping.stalled", "PONG with the bytes of its PING did not come"),
    "GOAWAY closes": ("mux.goaway", "closed the connection before END of the stream in flight"),
    "streams of all connections in one table": ("mux.connections.two", "stream 1 is in use"),
    "garbage ends the listener": ("mux.hostile.garbage", "Connect call failed"),
    "half-closed kept": ("mux.hostile.half-closed", "the end of the connection did not come"),
    "half a frame blocks all": ("mux.hostile.silent", "another caller is not served beside three"),
    "one lock for all writes": ("mux.hostile.not-read", "another caller is not served beside a caller"),
    "ERROR of a caller ignored": ("mux.hostile.error", "the end of the connection did not come"),
    "nonce used again": ("mux.secret.proof", "the same on two connections"),
    "right proof refused": ("mux.secret.right", "closed the connection before END"),
    "any proof taken": ("mux.secret.wrong", "ERROR for a wrong proof"),
    "no auth taken": ("mux.secret.absent", "ERROR for HELLO without `auth`"),
    "requests before AUTH taken": ("mux.secret.first", "ERROR for a request before AUTH"),
    "STEP unasked": ("mux.steps.unasked", "STEP frames came to a caller without the capability"),
    "STEP columns unequal": ("mux.steps.columns", "the columns of a STEP differ"),
    "requests declined": ("mux.open", "not today"),
    "token ids as text": ("mux.items.form", "token_ids are not numbers"),
    "offsets from one": ("mux.items.offsets", "has offset 1, not 0"),
    "finish_reason unknown": ("mux.items.finish", "finish_reason 'done'"),
    "large item in one frame": ("mux.items.parts", "an item travelled in one frame of"),
    "END without the total": ("mux.end.total", "END counts 0 tokens, and 4 came"),
    "END twice": ("mux.end.once", "1 items came after the END"),
    "streams mixed": ("mux.streams.many", "has offset"),
    "a token less for some": ("mux.streams.many", "got [7, 8] tokens"),
    "a stalled stream holds the others": ("mux.streams.interleaved", "END did not come"),
    "ids of 16 bits": ("mux.streams.ids", "item of stream 1 came"),
    "id in use taken": ("mux.streams.id-in-use", "ERROR for a second OPEN of stream 1"),
    "stream 0 taken": ("mux.streams.id-zero", "ERROR for OPEN on stream 0"),
    "deadline ignored": ("mux.deadline", "END after a deadline of 300 ms did not come"),
    "BODY pieces mixed": ("mux.body.pieces", "InvalidArgument"),
    "BODY of a killed stream refused": ("mux.body.cancelled", "stream 1 is not open"),
    "size unchecked": ("mux.body.size", "bytes were taken for"),
    "large body awaited": ("mux.body.too-large", "the refusal of a body of 33554433 bytes did not come"),
    "credits ignored": ("mux.credits.window", "items came without credit"),
    "CREDIT ignored": ("mux.credits.continue", "the items that CREDIT allows did not come"),
    "END waits for credit": ("mux.credits.end-free", "END of 8 tokens with 8 credits did not come"),
    "CREDIT for an unknown stream refused": ("mux.credits.unknown", "is not open"),
    "stop ignored": ("mux.cancel.stop", "END after CANCEL 0 did not come"),
    "END after a kill": ("mux.cancel.kill", "END came after CANCEL 1"),
    "CANCEL for an unknown stream refused": ("mux.cancel.ended", "is not open"),
    "killed requests go on": ("mux.cancel.frees", "no request is served after 24 requests were killed"),
    "requests of a lost connection go on": ("mux.cancel.lost-frees", "no request is served after a connection"),
    "unknown path is an InvalidArgument": ("mux.error.unknown-path", "not a WorkerUnavailable"),
    "malformed body is Unknown": ("mux.error.malformed-body", "not an InvalidArgument"),
    "wrong type served": ("mux.error.wrong-type", "token_ids that are a text ended without an error"),
    "error without a message": ("mux.error.record", "has no `message`"),
    "a malformed body ends the connection": (
        "mux.error.alone",
        "closed the connection before END for a malformed body",
    ),
    "malformed OPEN ignored": ("mux.error.malformed-open", "the refusal of OPEN with c1 did not come"),
    "ACK with a text": ("native.ack", "the ACK is 'OK'"),
    "ACKs out of order": ("native.ack.pipelined", "the ACKs of three requests"),
    "a read is a request": ("native.request.split", "the ACK is "),
    "headers required": ("native.request.headers", "no header request-id"),
    "unknown members refused": ("native.request.unknown-members", "an unknown member"),
    "answers in msgpack only": ("native.request.json", "an item is not json"),
    "answers end with the request's connection": ("native.request.left", "did not"),
    "handshake without stream_type": ("native.answer.handshake", "without stream_type response"),
    "prologue missing": ("native.answer.prologue", "is no prologue: it has data"),
    "items without an envelope": ("native.answer.items", "an item is not data and complete_final"),
    "no complete_final": ("native.answer.end", "not complete_final"),
    "no sentinel": ("native.answer.sentinel", "not the sentinel"),
    "one answer at a time": ("native.answer.many", "did not come"),
    "native stop ignored": ("native.cancel.stop", "items still come"),
    "native kill ignored": ("native.cancel.kill", "items still come"),
    "answers of lost callers go on": ("native.cancel.left", "did not come within"),
    "old text for an unknown path": ("native.error.unknown-path", "the ACK for an unknown path is 'unknown endpoint"),
    "native error without an event": ("native.error.item", "are answered without an error"),
    "malformed body swallowed": ("native.error.malformed-body", "did not bring its answer"),
    "long request awaited": ("native.hostile.length", "was not closed"),
    "lengths of parts trusted": ("native.hostile.parts", "was accepted"),
    "malformed control accepted": ("native.hostile.control", "was accepted"),
    "another context taken": ("native.hostile.context", "although its context is another one's"),
    "native garbage ends the listener": ("native.hostile.garbage", "Connect call failed"),
    "half a request blocks all": ("native.hostile.half", "another caller is not served beside half"),
    "a refused answer ends the connection": ("native.hostile.home", "the ACK is None"),
    "one lock for all ACKs": ("native.hostile.not-read", "another caller is not served beside a caller"),
}
CHECKS = {check.id: check for check in all_checks()}
SOON = PATIENCE_SECONDS / 60
"""Seconds until what a fault keeps from coming is missed. What comes does so at once."""
MISSED = ("did not", "ERROR for", "was not closed", "not served", "no request is served", "still come")


async def _judged(
    worker: FaultyWorker, *ids: str, timeout: float = PATIENCE_SECONDS, secret: Path | None = None
) -> list[Result]:
    flags = WireFlags(timeout=timeout, limit=2 * PATIENCE_SECONDS, secret_file=secret)
    shared = made_run(flags, worker.address)
    return await judge(shared, [], [CHECKS[name] for name in ids])


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    return file


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_found_by_the_check_that_names_it(
    fault: str, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, reason = FAULTS[fault]
    monkeypatch.setattr("dynamo.cli.referee.wire.connection_checks.HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr("dynamo.cli.referee.wire.connection_checks.LATE_SECONDS", 0.2)
    is_secret = name.startswith("mux.secret")
    async with faulty_worker(fault, SECRET if is_secret else b"") as worker:
        timeout = SOON if any(words in reason for words in MISSED) else PATIENCE_SECONDS
        (found,) = await _judged(worker, name, timeout=timeout, secret=secret if is_secret else None)
    assert (found.outcome, found.cause) == (CheckOutcome.FAILED, None), found
    assert reason in found.reason, found.reason


def test_each_check_has_a_fault_that_it_finds() -> None:
    assert {name for name, _ in FAULTS.values()} == set(CHECKS)


@pytest.mark.parametrize("fault", ["version echoed", "END twice", "no sentinel"])
async def test_a_narrow_fault_is_found_by_no_other_check(fault: str) -> None:
    async with faulty_worker(fault) as worker:
        worker.hello_seconds = 0.1
        found = await _judged(worker, *CHECKS)
    assert {one.check.id for one in found if one.outcome is CheckOutcome.FAILED} == {FAULTS[fault][0]}


@pytest.mark.parametrize("wire", ["mux", "mux,native"])
async def test_a_worker_without_a_fault_passes_every_check(wire: str, secret: Path) -> None:
    has_secret = wire == "mux"  # the native wire has no place for it
    async with faulty_worker("", SECRET if has_secret else b"", wire) as worker:
        worker.hello_seconds = 0.1
        names = [name for name in CHECKS if not has_secret or name.startswith("mux")]
        found = await _judged(worker, *names, secret=secret if has_secret else None)
    others = {one.check.id: one.cause for one in found if one.outcome is not CheckOutcome.PASSED}
    without = {"mux.hello.not-awaited"} if has_secret else {name for name in CHECKS if "secret" in name}
    assert others == dict.fromkeys(without, Cause.NOT_OFFERED)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_wire_that_is_not_spoken_is_no_fault_unless_it_is_named(wire: str) -> None:
    async with faulty_worker(wires=wire) as worker:
        (other,) = set(WIRES) - {wire}
        for named, cause in (([], Cause.NOT_OFFERED), ([*WIRES], Cause.ABSENT)):
            shared = made_run(WireFlags(timeout=SOON), worker.address)
            await find_wires(shared, named)
            checks = [CHECKS["mux.ping"], CHECKS["native.ack"]]
            found = {one.check.id.partition(".")[0]: one for one in await judge(shared, named, checks)}
            assert found[wire].outcome is CheckOutcome.PASSED
            assert (found[other].outcome, found[other].cause) == (CheckOutcome.CANNOT_JUDGE, cause)
            assert f"does not speak {other}" in found[other].reason
            assert report.core_holds(list(found.values())) is not bool(named)
        skipped = await judge(shared, [wire], checks)
        assert {one.check.id.partition(".")[0] for one in skipped if one.outcome is CheckOutcome.SKIPPED} == {other}


async def test_a_worker_that_needs_a_secret_or_speaks_nothing_is_an_error_of_use(secret: Path) -> None:
    async with faulty_worker(secret=SECRET, wires="mux") as worker:
        with pytest.raises(UsageError, match=r"speaks no wire that is judged.*the secret is not proven"):
            await find_wires(made_run(WireFlags(timeout=SOON), worker.address), [])
    async with faulty_worker(wires="") as worker:
        with pytest.raises(UsageError, match="speaks no wire that is judged"):
            await find_wires(made_run(WireFlags(timeout=SOON), worker.address), [])


async def test_a_request_that_is_no_map_is_sent_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('["a", "raw", "engine"]')
    async with faulty_worker("wrong type served") as worker:
        run = made_run(WireFlags(timeout=SOON, model_request=file), worker.address)
        assert run.sized(100) == ["a", "raw", "engine"]
        found = await judge(run, [], [CHECKS["mux.error.wrong-type"], CHECKS["native.error.item"]])
    assert {(one.outcome, one.cause) for one in found} == {(CheckOutcome.CANNOT_JUDGE, Cause.MODEL)}


async def test_the_report_has_the_form_of_all_reports(tmp_path: Path) -> None:
    async with faulty_worker("END twice") as worker:
        found = await _judged(worker, "mux.end.once", "mux.ping")
        made = json.loads(json.dumps(report.as_json(found, worker.address, "")))
    Draft202012Validator(report.SCHEMA).validate(made)
    assert (made["url"], made["core_passed"]) == (worker.address, False)
    assert "ITEMS stream 0" in made["checks"][0]["seen"]
    assert made["checks"][0]["sent"].startswith("magic\nHELLO")
    assert "Model" not in report.as_html(found, worker.address, "")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "a worker's address is missing"),
        (["127.0.0.1:1/p"], "127.0.0.1:1 cannot be reached"),
        (["127.0.0.1/p"], "use HOST:PORT/PATH"),
        (["127.0.0.1:1/p", "--wire", "quic"], "there is no 'quic'; use mux or native"),
        (["127.0.0.1:1/p", "--secret-file", "/no/such/file"], "--secret-file: cannot read /no/such/file"),
        (["127.0.0.1:1/p", "--model-request", "/no/such/file"], "cannot be read as JSON"),
        (["backend.generate"], "neither HOST:PORT/PATH nor NAMESPACE.COMPONENT.ENDPOINT"),
        (["ns.c.e", "--discovery-backend", "mem"], "discovery .mem. has no worker of ns.c.e"),
    ],
)
def test_an_error_of_use_is_one_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        main(argv)


def test_the_help_names_the_three_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dynamo(["conformance", "--help"])
    said = capsys.readouterr().out
    assert [form for form in ("module:Class", "http://HOST/v1", "worker ADDRESS") if form not in said] == []


def test_the_page_has_the_table_that_list_prints(
    capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    assert dynamo(["conformance", "worker", "--list"]) == 0
    page = Path(pytestconfig.rootpath, "docs", "conformance.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page


def test_each_clause_names_a_section_of_its_page(pytestconfig: pytest.Config) -> None:
    for check in CHECKS.values():
        page, _, rest = check.clause.partition(", ")
        text = Path(pytestconfig.rootpath, page).read_text(encoding="utf-8")
        section, colon, _ = rest.partition(":")
        assert colon
        assert f"# {section}\n" in text, check.clause

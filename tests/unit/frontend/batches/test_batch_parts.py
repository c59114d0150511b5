"""The parts of batches one by one: the journal after a crash, the groups it is written in, turns, gates, forms."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.admission.model import AdmissionPolicy, ModelAdmission, Urgency
from dynamo.frontend.base.shares import SharedBound
from dynamo.frontend.http.multipart import FilePiece, FormField, read_form
from dynamo.frontend.parts.batches.fair_slots import FairSlots
from dynamo.frontend.parts.batches.group_commit import GroupCommit
from dynamo.frontend.parts.batches.input_check import LineReader, check_input
from dynamo.frontend.parts.batches.journal import LineResult, ResultJournal
from dynamo.frontend.parts.batches.line_call import Fate, LineAnswer
from dynamo.frontend.parts.batches.line_pace import LinePace
from dynamo.frontend.parts.batches.model_gate import ModelGate, ModelGates
from dynamo.frontend.parts.batches.records import BatchRecord
from dynamo.frontend.parts.batches.run import MAX_DEFERRED, READ_LINES, BatchRun, LineQueue
from dynamo.protocol.batches.lines import BatchLine, line_number_of, line_request_id, result_line
from dynamo.protocol.batches.objects import BatchObject
from dynamo.protocol.batches.status import TRANSITIONS, BatchStatus
from dynamo.protocol.openai.errors import RequestRejected
from dynamo.runtime.base.tasks import Background
from support.batch_client import BOUNDARY, FORM_HEADERS, chat_line, form, jsonl
from support.patience import PATIENCE_SECONDS

BODY = b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}'


def result(number: int, *, is_success: bool = True) -> LineResult:
    id = line_request_id("batch_ab", number)
    line = result_line(id, f"line-{number}", 200 if is_success else 400, id, BODY)
    return LineResult(number, is_success, line, BODY if is_success else b"")


def test_the_states_of_a_batch_lead_to_an_end() -> None:
    assert {status for status in BatchStatus if status.is_final} == {
        BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED,
    }  # fmt: skip
    assert set(TRANSITIONS) == set(BatchStatus)


@given(st.integers(0, 0xFFFF_FFFF))
def test_a_request_id_holds_the_number_of_its_line(number: int) -> None:
    assert line_number_of(line_request_id("batch_0f", number)) == number


# -- the journal -------------------------------------------------------------------------------------------------------


def test_a_journal_that_is_opened_again_knows_what_is_done(tmp_path: Path) -> None:
    journal = ResultJournal(tmp_path, 5)
    journal.append([result(0), result(3), result(1, is_success=False)])
    journal.append([result(0)])  # executed twice: the first result stays
    journal.close()

    again = ResultJournal(tmp_path, 5)

    assert list(again.missing()) == [2, 4]
    assert (again.counts.completed, again.counts.failed) == (2, 1)
    assert (again.usage.input_tokens, again.usage.output_tokens, again.usage.total_tokens) == (6, 4, 10)
    assert again.usage.input_tokens_details.cached_tokens == 2
    again.close()


def test_half_a_line_is_cut_whereever_the_crash_came(tmp_path: Path) -> None:
    lines = [result(0).line, result(1).line]
    for cut in (*range(0, len(lines[1]), 7), len(lines[1]) - 1):  # the last: all but the line feed
        (tmp_path / "out.jsonl").write_bytes(lines[0] + lines[1][:cut])
        journal = ResultJournal(tmp_path, 2)
        journal.append([result(1)])
        journal.close()
        assert (tmp_path / "out.jsonl").read_bytes() == b"".join(lines), cut


def test_a_line_of_zeros_is_what_a_power_loss_leaves(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(result(0).line + b"\0" * 40 + b"\n")
    journal = ResultJournal(tmp_path, 2)
    assert list(journal.missing()) == [1]
    assert (tmp_path / "out.jsonl").read_bytes() == result(0).line
    journal.close()


def test_what_the_disk_did_not_take_whole_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = ResultJournal(tmp_path, 3)
    journal.append([result(0)])
    real = os.write

    def full(file: int, data: Any) -> int:
        real(file, bytes(data)[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("dynamo.frontend.parts.batches.journal.os.write", full)
        with pytest.raises(OSError, match="No space"):
            journal.append([result(1)])

    assert (tmp_path / "out.jsonl").read_bytes() == result(0).line
    journal.append([result(1)])
    assert list(journal.missing()) == [2]
    journal.close()


async def on_loop(work: Callable[..., Any], *args: Any) -> Any:
    await asyncio.sleep(0)
    return work(*args)


async def test_results_that_come_together_share_one_wait_for_the_disk(tmp_path: Path) -> None:
    journal, groups = ResultJournal(tmp_path, 10), list[int]()
    real = journal.append
    journal.append = lambda results: (groups.append(len(results)), real(results))[1]  # type: ignore[method-assign]
    commit = GroupCommit(journal, on_loop, "batch_ab", lambda: None)  # type: ignore[arg-type]
    task = asyncio.ensure_future(commit.run())
    for number in range(10):
        commit.add(result(number))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(commit):
            await asyncio.sleep(0)
    task.cancel()
    assert groups == [10]
    assert journal.counts.completed == 10
    journal.close()


# -- the input ---------------------------------------------------------------------------------------------------------


def test_lines_are_found_again_by_their_number(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [chat_line(f"ü-{number}", "x" * number) for number in range(30)]
    source.write_bytes(b"\n" + jsonl(lines).replace(b"\n", b"\r\n", 3).rstrip(b"\n"))
    (tmp_path / "work").mkdir()

    found = check_input(source, tmp_path / "work", "/v1/chat/completions", max_line_bytes=4096)

    assert (found.lines, found.model, found.errors) == (30, "m", [])
    reader = LineReader(source, tmp_path / "work")
    assert len(reader) == 30
    assert [line.custom_id for _, line in reader.read_some(0, lines=64, limit_bytes=10**6)] == [
        line["custom_id"] for line in lines
    ]
    assert len(reader.read_some(5, lines=64, limit_bytes=1)) == 1
    assert reader.read(29).custom_id == "ü-29"
    reader.close()


def test_an_input_is_refused_as_a_whole_and_names_its_lines(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([chat_line("a"), {"custom_id": "b"}, chat_line("c", method="PUT")]))

    found = check_input(source, tmp_path / "work", "/v1/chat/completions", max_line_bytes=4096)

    assert [(error.code, error.line, error.param) for error in found.errors] == [
        ("missing_required_parameter", 2, "method"),
        ("invalid_method", 3, "method"),
    ]
    assert not (tmp_path / "work").exists()


def test_no_more_than_a_hundred_errors_are_listed_and_a_long_line_ends_the_check(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"{}\n" * 300)
    assert len(check_input(source, tmp_path / "work", "/v1/completions", max_line_bytes=100).errors) == 100
    source.write_bytes(b"[" * 1000)
    (error,) = check_input(source, tmp_path / "work", "/v1/completions", max_line_bytes=100).errors
    assert error.code == "line_too_long"


# -- turns and gates ---------------------------------------------------------------------------------------------------


async def test_a_small_batch_waits_for_one_line_of_a_huge_one() -> None:
    bound = SharedBound(1, None)
    slots, order = FairSlots(bound), list[str]()

    async def lines(owner: str, batch: str, count: int) -> None:
        for _ in range(count):
            await slots.acquire(owner, batch)
            order.append(batch)
            await asyncio.sleep(0)
            slots.release(owner)

    await asyncio.gather(lines("a", "huge", 20), lines("a", "second", 4), lines("b", "small", 4))
    assert order.index("small") <= 2
    # Two owners take turns, and the batches of one owner share that owner's turns.
    assert order[:8].count("small") == 4
    assert order[:16].count("second") == 4
    assert bound.used == 0


async def test_a_slot_that_was_granted_to_a_cancelled_wait_comes_back() -> None:
    bound = SharedBound(1, None)
    slots = FairSlots(bound)
    await slots.acquire("a", "1")
    waiting = asyncio.ensure_future(slots.acquire("a", "2"))
    await asyncio.sleep(0)
    slots.release("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert bound.used == 0


def test_a_gate_opens_wider_with_every_answer_and_shuts_at_a_refusal() -> None:
    gate = ModelGates().of("m")
    admission = ModelAdmission("m", AdmissionPolicy())
    admission.set_capacity(1000)
    entered = sum(gate.enter(0.0, admission, 1) for _ in range(10))
    assert entered == 4
    for _ in range(4):
        gate.answered()
    assert sum(gate.enter(0.0, admission, 1) for _ in range(20)) == 8
    gate.refused(0.0, 10.0)
    for _ in range(7):
        gate.refused(0.0, 10.0)  # they were under way: one refusal, not eight
    assert not gate.enter(9.0, admission, 1)
    assert sum(gate.enter(11.0, admission, 1) for _ in range(20)) == 4


def test_lines_leave_room_for_the_requests_of_people() -> None:
    gate = ModelGates().of("m")
    admission = ModelAdmission("m", AdmissionPolicy())
    admission.set_capacity(16)
    for _ in range(14):
        admission.enter(Urgency.NORMAL, 0.0)
    assert not gate.enter(0.0, admission, 1)


def test_one_line_finds_out_whether_a_model_is_back() -> None:
    gate = ModelGates().of("m")
    assert gate.enter(0.0, None, 0)
    assert not gate.enter(0.0, None, 0)


# -- forms -------------------------------------------------------------------------------------------------------------


class Lines:
    """An input of lines of one model; a read may be refused."""

    def __init__(self, count: int) -> None:
        self.count, self.reads, self.refusals = count, list[int](), 0

    def __len__(self) -> int:
        return self.count

    def read(self, number: int) -> BatchLine:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EIO, "the disk refuses")
        return BatchLine(f"l{number}", msgspec.Raw(b'{"model":"m"}'))

    def read_some(self, first: int, *, lines: int, limit_bytes: int) -> list[tuple[int, BatchLine]]:
        found = range(first, min(self.count, first + lines))
        self.reads += found
        return [(number, self.read(number)) for number in found]


def queue_of(
    lines: Lines, gate: ModelGate, tmp_path: Path, *, is_full: Callable[[], bool] = lambda: False
) -> LineQueue:
    def enter(model: str) -> ModelGate | None:
        return gate if not is_full() and gate.enter(0.0, None, 0) else None

    journal = ResultJournal(tmp_path, lines.count)
    return LineQueue(journal, lines, on_loop, enter, random.Random(1))  # type: ignore[arg-type]


async def test_a_line_that_cannot_be_read_again_loses_neither_its_place_nor_itself(tmp_path: Path) -> None:
    lines, gate, full = Lines(2), ModelGate(lambda: 1.0), True
    queue = queue_of(lines, gate, tmp_path, is_full=lambda: full)
    assert await queue.next_line() is None  # both wait for the model
    full, lines.refusals = False, 1
    with pytest.raises(OSError, match="the disk refuses"):
        await queue.next_line()
    assert gate.in_flight == 0
    found = await queue.next_line()
    assert found is not None
    assert (found.number, gate.in_flight) == (0, 1)
    gate.left()
    assert queue.retries.add(0, LineAnswer(500, b"", Fate.RETRY, 0.0), -1000.0)
    lines.refusals = 1
    with pytest.raises(OSError, match="the disk refuses"):
        await queue.next_line()
    again = await queue.next_line()
    assert again is not None
    assert again.number == 0


async def test_no_more_of_a_file_is_read_than_waits_for_its_model(tmp_path: Path) -> None:
    lines, full = Lines(50_000), True
    queue = queue_of(lines, ModelGate(lambda: 1.0), tmp_path, is_full=lambda: full)
    for _ in range(3):
        assert await queue.next_line() is None
    assert len(lines.reads) <= MAX_DEFERRED + READ_LINES
    full, found = False, list[int]()
    while len(found) < 2000 and (line := await queue.next_line()) is not None:
        line.gate.left()
        found.append(line.number)
    assert sorted(found) == list(range(2000))


async def parts_of(body: bytes, size: int, content_type: str = "") -> list[FormField | FilePiece]:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]

    async def receive() -> dict[str, Any]:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    kind = (content_type or FORM_HEADERS["content-type"]).encode()
    return [part async for part in read_form({b"content-type": kind}, receive)]


@given(st.binary(max_size=300), st.integers(1, 50))
async def test_a_form_is_the_same_in_whatever_pieces_it_comes(data: bytes, size: int) -> None:
    if BOUNDARY.encode() in data:
        return
    found = await parts_of(form(data, purpose="batch"), size)
    fields = [part for part in found if isinstance(part, FormField)]
    files = [part for part in found if isinstance(part, FilePiece)]
    assert fields == [FormField("purpose", "batch")]
    assert b"".join(part.data for part in files) == data
    assert {part.filename for part in files} == {"in.jsonl"}


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"{}", "multipart/form-data", 415),
        (b"rubbish", "", 400),
        (form(b"data")[:-10], "", 400),
        (b"".join(form(b"", **{f"f{n}": "v"})[:80] for n in range(40)), "", 400),
    ],
)
async def test_what_is_not_a_form_is_refused(body: bytes, content_type: str, status: int) -> None:
    with pytest.raises(RequestRejected) as caught:
        await parts_of(body, 64, content_type)
    assert caught.value.status == status


async def test_a_line_that_is_cancelled_before_its_first_step_gives_its_places_back(tmp_path: Path) -> None:
    source, work = tmp_path / "in", tmp_path / "work"
    source.write_bytes(jsonl([chat_line("line-0")]))
    check_input(source, work, "/v1/chat/completions", max_line_bytes=4096)
    journal, reader = ResultJournal(work, 1), LineReader(source, work)
    gates, bound, pace = ModelGates(), SharedBound(1, None), LinePace(lambda: False)
    batch = BatchObject(
        id="batch_ab", endpoint="/v1/chat/completions", input_file_id="file-1", created_at=0, expires_at=0
    )
    served = SimpleNamespace(admission=None, workers=1)
    parts: Any = SimpleNamespace(
        is_open=lambda: True, slots=FairSlots(bound, pace.begin), pace=pace, gates=gates, disk=asyncio.to_thread, rng=random.Random(),
        models=SimpleNamespace(lookup=lambda _: served), known_models=set(), is_revoked=lambda _: False,
    )  # fmt: skip
    run = BatchRun(BatchRecord(batch=batch, owner="owner", key_id=""), journal, reader, parts)
    async with Background() as background:
        assert await run._begin_line(background)
        assert gates.of("m").in_flight == 1
    await asyncio.sleep(0)  # the callbacks of the task
    assert gates.of("m").in_flight == 0
    assert bound.may_take("owner")
    assert not run._running

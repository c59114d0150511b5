"""Checks of OpenAI's Batch API: one batch of two lines, run to its end within a bounded wait."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from dynamo.cli.referee.apis.files import PATH as FILES
from dynamo.cli.referee.apis.files import delete, upload
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand, demand_route, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import CHAT, PROMPT, UNKNOWN

PATH: Final = "/v1/batches"
PAGE: Final = "OpenAI reference, Batch"
WAIT_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 0.2
STATUSES: Final = (
    *("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"),
)
ENDED: Final = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch: how it began and ended, and the lines of its files."""

    begun: Json
    ended: Json
    listed: ServerAnswer
    output: list[Json]
    errors: list[Json]


def lines(probe: Probe, *, with_fault: bool) -> bytes:
    """Build the input of a batch. The second line lacks its messages, where one is to fail."""
    good = CHAT.body(probe.model, PROMPT, max_tokens=4)
    bad = {"model": probe.model, "max_tokens": 4}
    bodies = {"first": good, "second": bad if with_fault else good}
    rows = [{"custom_id": name, "method": "POST", "url": CHAT.path, "body": asked} for name, asked in bodies.items()]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def create(probe: Probe, file: str, **more: Json) -> ServerAnswer:
    """Create a batch."""
    asked = {"input_file_id": file, "endpoint": CHAT.path, "completion_window": "24h", **more}
    return await probe.post(PATH, asked, is_fresh=True)


async def _lines_of(probe: Probe, name: Json) -> list[Json]:
    if not isinstance(name, str):
        return []
    answer = await probe.get(f"{FILES}/{quote(name)}/content")
    await delete(probe, name)
    try:
        return [json.loads(line) for line in answer.body.splitlines() if line.strip()]
    except ValueError as error:
        raise CannotJudge(f"a file of results has a line that is not JSON: {error}", Cause.SERVER) from None


async def ran(probe: Probe, *, with_fault: bool) -> Ran:
    """Run a batch once for all checks, and delete its files."""

    async def make() -> Ran:
        source = await upload(probe, lines(probe, with_fault=with_fault))
        answer = await create(probe, source["id"])
        demand_route(probe, answer)
        begun = served(answer, is_optional=True).json()
        if not isinstance(member(begun, "id"), str):
            raise CannotJudge("the object of a batch has no id", Cause.SERVER)
        where, now = f"{PATH}/{quote(begun['id'])}", begun
        for _ in range(round(WAIT_SECONDS / LOOK_SECONDS)):
            if member(now, "status") in ENDED:
                break
            await asyncio.sleep(LOOK_SECONDS)
            now = served(await probe.get(where)).json()
        else:
            raise CannotJudge(f"the batch is {member(now, 'status')!r} after {WAIT_SECONDS:g} s", Cause.TIME)
        listed = await probe.get(PATH)
        output = await _lines_of(probe, member(now, "output_file_id"))
        errors = await _lines_of(probe, member(now, "error_file_id"))
        await delete(probe, source["id"])
        return Ran(begun, now, listed, output, errors)

    found: Ran = await probe.step(f"batch {with_fault}", make)
    return found


async def check_create(probe: Probe) -> None:
    made = (await ran(probe, with_fault=False)).begun
    demand(member(made, "object") == "batch", f"object is {member(made, 'object')!r}, not 'batch'")
    demand(member(made, "endpoint") == CHAT.path, f"endpoint is {member(made, 'endpoint')!r}")
    demand(member(made, "status") in STATUSES, f"status is {member(made, 'status')!r}")
    demand(isinstance(member(made, "input_file_id"), str), "input_file_id is not a text")
    demand(member(made, "completion_window") == "24h", f"completion_window is {member(made, 'completion_window')!r}")
    demand(isinstance(member(made, "created_at"), int), "created_at is not a whole number")


async def check_end(probe: Probe) -> None:
    found = (await ran(probe, with_fault=False)).ended
    demand(member(found, "status") == "completed", f"the batch ended as {member(found, 'status')!r}: {found!r}")
    demand(isinstance(member(found, "output_file_id"), str), "the completed batch has no output_file_id")


def _counts(found: Json) -> list[Json]:
    return [member(found, "request_counts", name) for name in ("total", "completed", "failed")]


async def check_counts(probe: Probe) -> None:
    counts = _counts((await ran(probe, with_fault=False)).ended)
    demand(counts == [2, 2, 0], f"total, completed and failed are {counts}, not [2, 2, 0]")


async def check_output(probe: Probe) -> None:
    found = (await ran(probe, with_fault=False)).output
    names = sorted(str(member(line, "custom_id")) for line in found)
    demand(names == ["first", "second"], f"the output has lines for {names}, not each custom_id once")
    for line in found:
        status = member(line, "response", "status_code")
        demand(status == 200, f"response.status_code is {status!r}")
        demand(isinstance(member(line, "response", "body", "choices"), list), "response.body has no choices")
        demand(member(line, "error") is None, f"error is {member(line, 'error')!r} beside a response")


async def check_list(probe: Probe) -> None:
    found = await ran(probe, with_fault=False)
    shown = served(found.listed).json()
    names = [member(each, "id") for each in member(shown, "data") or []]
    if found.begun["id"] not in names and member(shown, "has_more"):
        raise CannotJudge("the batch is not on the first page of the list")
    demand(found.begun["id"] in names, "the batch is not in the list")


async def check_line_error(probe: Probe) -> None:
    found = await ran(probe, with_fault=True)
    if member(found.ended, "status") == "failed":
        raise CannotJudge("the server checks the bodies of all lines first, and refuses the batch", Cause.NOT_OFFERED)
    demand(member(found.ended, "status") == "completed", f"the batch ended as {member(found.ended, 'status')!r}")
    counts = _counts(found.ended)
    demand(counts == [2, 1, 1], f"total, completed and failed are {counts}, not [2, 1, 1]")
    names = [member(line, "custom_id") for line in found.errors]
    demand(names == ["second"], f"the error file has lines for {names}, not for the second line")


async def check_unknown(probe: Probe) -> None:
    answer = await probe.get(f"{PATH}/batch_00000000000000000000000000000000")
    demand(answer.status == 404, f"expected status 404, got {answer.message}")


async def check_unknown_file(probe: Probe) -> None:
    answer = await create(probe, "file-00000000000000000000000000000000")
    demand(answer.status in (400, 404), f"expected status 400 or 404, got {answer.message}")


async def check_endpoint(probe: Probe) -> None:
    source = await upload(probe, lines(probe, with_fault=False))
    answer = await create(probe, source["id"], endpoint=f"/v1/{UNKNOWN}")
    await delete(probe, source["id"])
    demand(answer.status == 400, f"expected status 400, got {answer.message}")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("batch.create", check_create, _CORE, "major", f"{PAGE}, The batch object: object, endpoint, status, input_file_id, completion_window and created_at", "Write every required member with its type"),
    ("batch.end", check_end, _CORE, "major", f"{PAGE}, The batch object: a batch whose lines are answered is completed, with output_file_id", "Write the output before the status"),
    ("batch.counts", check_counts, _CORE, "major", f"{PAGE}, The batch object: request_counts are those of the lines", "Count each line once"),
    ("batch.output", check_output, _CORE, "major", f"{PAGE}, The request output object: each custom_id once, with status_code and body", "Write one line for each line of the input"),
    ("batch.list", check_list, _AGENT, "minor", f"{PAGE}, List batches: a list with the batch", "Serve GET /v1/batches"),
    ("batch.line-error", check_line_error, _AGENT, "major", f"{PAGE}, The batch object: a line that fails is in the error file, and the others are answered", "Go on with the other lines"),
    ("batch.unknown", check_unknown, _CORE, "major", "OpenAI reference, Error codes: a batch that does not exist is 404", "Refuse it with 404"),
    ("batch.unknown-file", check_unknown_file, _CORE, "major", f"{PAGE}, Create batch: input_file_id names an uploaded file", "Refuse others with 400 or 404"),
    ("batch.endpoint", check_endpoint, _AGENT, "minor", f"{PAGE}, Create batch: endpoint is one of the named ones", "Refuse others with 400"),
)  # fmt: skip

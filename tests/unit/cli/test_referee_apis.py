"""`dynamo conformance URL` for the APIs beside chat and completions: one named fault each, found by its own check."""

from __future__ import annotations

import pytest

from dynamo.cli.bench.targets import Target
from dynamo.cli.referee.apis import API_CHECKS
from dynamo.cli.referee.checks import Cause, CheckOutcome, RefereeRun, Result
from dynamo.cli.referee.command import all_checks, find_model, judge
from dynamo.cli.referee.exchange import Server
from dynamo.cli.referee.report import core_holds
from support.faulty_server import faulty_server
from support.patience import PATIENCE_SECONDS

# The checks that find a fault, without the name of the API. Where there are several, the others are its consequences.
RESPONSES = {
    "tools missing": {"answer.shape"},
    "item without an id": {"answer.items"},
    "error beside an answer": {"answer.status"},
    "answer not as JSON": {"answer.content-type"},
    "usage does not add up": {"usage.adds-up"},
    "details missing": {"usage.details"},
    "limit called completed": {"max-output-tokens"},
    "instructions ignored": {"instructions"},
    "items counted differently": {"input.messages"},
    "arguments not JSON": {"tool-call"},
    "schema broken": {"json-schema"},
    "earlier turns forgotten": {"stored.previous"},
    "unknown previous taken": {"stored.unknown"},
    "stored object differs": {"stored.retrieve"},
    "deleted response found": {"stored.delete"},
    "stream as text": {"stream.content-type"},
    "stream cached": {"stream.cache-control"},
    "name of events wrong": {"stream.names"},
    "number twice": {"stream.numbers"},
    "in_progress missing": {"stream.begin"},
    "output at the start": {"stream.first-response"},
    "two ends": {"stream.end"},
    "usage missing at the end": {"stream.last-response"},
    "finished items missing at the end": {"stream.last-response"},
    "another id at the end": {"stream.one-id"},
    "item not done": {"stream.items"},
    "output_index from 1": {"stream.items"},
    "items overlap": {"stream.one-open"},
    "part not done": {"stream.parts"},
    "delta lost": {"stream.text"},
    "bytes of a character apart": {"stream.unicode"},
    "streamed usage differs": {"usage.streamed-equal"},
    "call_id changes": {"stream.tool-events"},
    "200 for an unknown model": {"error.unknown-model"},
    "500 for malformed JSON": {"error.malformed-json"},
    "wrong type taken": {"error.wrong-type"},
    "422 for a missing input": {"error.missing-member"},
    "error as text": {"error.shape"},
    "results in another order refused": {"agent.tool-results"},
    "result parts refused": {"agent.tool-result-parts"},
    "tool called in spite of none": {"agent.tool-choice-none"},
    "required ignored": {"agent.tool-choice-required"},
    "no usage of streamed calls": {"agent.tool-usage"},
    "thoughts in the text": {"agent.reasoning-apart"},
    "long list refused": {"agent.long-conversation"},
    "later developer refused": {"agent.later-developer"},
    "client_metadata refused": {"agent.known-members"},
    "unknown member is 500": {"agent.unknown-member"},
}
MESSAGES = {
    "role missing": {"answer.shape"},
    "block of an unknown type": {"answer.blocks"},
    "stop_reason of another API": {"answer.stop-reason"},
    "answer not as JSON": {"answer.content-type"},
    "count of the cache as text": {"usage"},
    "max_tokens overrun": {"max-tokens"},
    "limit called end_turn": {"max-tokens"},
    "stop_sequence not named": {"stop-sequences"},
    "system ignored": {"system"},
    "system blocks counted twice": {"system.blocks"},
    "content blocks counted differently": {"content.blocks"},
    "request-id missing": {"request-id"},
    "max_tokens optional": {"error.missing-max-tokens"},
    "error.type does not fit": {"error.types"},
    "input as text": {"tool-use"},
    "count without its name": {"count-tokens"},
    "count far off": {"count-tokens.equal"},
    "model without a name": {"models"},
    "stream as text": {"stream.content-type"},
    "stream cached": {"stream.cache-control"},
    "name of events wrong": {"stream.names"},
    "message_stop missing": {"stream.order"},
    "content at the start": {"stream.start"},
    "index from 1": {"stream.blocks"},
    "block not stopped": {"stream.blocks"},
    "text as thinking_delta": {"stream.deltas"},
    "end without stop_reason": {"stream.end"},
    "bytes of a character apart": {"stream.unicode"},
    "streamed usage differs": {"usage.streamed-equal"},
    "input cut off": {"stream.tool-deltas"},
    "call ends with end_turn": {"stream.tool-end"},
    "200 for an unknown model": {"error.unknown-model"},
    "500 for malformed JSON": {"error.malformed-json"},
    "wrong type taken": {"error.wrong-type"},
    "422 for missing messages": {"error.missing-member"},
    "error without its type": {"error.shape"},
    "results in another order refused": {"agent.tool-results"},
    "result blocks refused": {"agent.tool-result-blocks"},
    "is_error refused": {"agent.tool-result-error"},
    "tool called in spite of none": {"agent.tool-choice-none"},
    "any ignored": {"agent.tool-choice-any"},
    "thoughts in the text": {"agent.thinking-apart"},
    "thinking refused": {"agent.thinking-back"},
    "long list refused": {"agent.long-conversation"},
    "?beta=true refused": {"agent.known-members"},
    "unknown member is 500": {"agent.unknown-member"},
}
EMBEDDINGS = {
    "object missing": {"answer.shape"},
    "numbers as text": {"answer.numbers"},
    "answer not as JSON": {"answer.content-type"},
    "index from 1": {"order"},
    "batch in another order": {"batch-equals-single"},
    "list of one differs": {"input.list-of-one"},
    "each token alone": {"input.tokens"},
    "token lists joined": {"input.token-lists"},
    "bytes in the other order": {"base64"},
    "dimensions ignored": {"dimensions"},
    "own dimensions change it": {"dimensions.whole"},
    "total differs": {"usage"},
    "usage of a list differs": {"usage.sum"},
    "empty input taken": {"error.empty-input"},
    "any encoding taken": {"error.encoding-format"},
    "500 for a long input": {"limit.input"},
    "200 for an unknown model": {"error.unknown-model"},
    "500 for malformed JSON": {"error.malformed-json"},
    "wrong type taken": {"error.wrong-type"},
    "422 for a missing input": {"error.missing-member"},
    "error as text": {"error.shape"},
}
FILES = {
    "bytes missing": {"upload"},
    "another name": {"retrieve"},
    "line ends changed": {"content"},
    "list of files without the newest": {"list"},
    "another id deleted": {"delete"},
    "deleted file found": {"deleted"},
    "400 for an unknown file": {"error.unknown-file"},
    "error as text": {"error.shape"},
    "500 without a file": {"error.missing-file"},
    "purpose optional": {"error.missing-purpose"},
    "object of a batch wrong": {"batch.create"},
    "called expired": {"batch.end"},
    "counts missing": {"batch.counts"},
    "a line twice": {"batch.output"},
    "lines refused": {"batch.output"},
    "list of batches without the newest": {"batch.list"},
    "failed by one line": {"batch.line-error"},
    "500 for an unknown batch": {"batch.unknown"},
    "500 for an unknown input": {"batch.unknown-file"},
    "any endpoint taken": {"batch.endpoint"},
}
FAULTS = {"responses": RESPONSES, "messages": MESSAGES, "embeddings": EMBEDDINGS, "files": FILES}
CASES = [(api, fault) for api, faults in FAULTS.items() for fault in faults]


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.cli.referee.apis.batches.LOOK_SECONDS", 0.01)


async def _judged(
    api: str, fault: str = "", *, limit: float = PATIENCE_SECONDS, names_apis: bool = True
) -> list[Result]:
    async with faulty_server(f"{api}: {fault}") as url:
        server = Server(Target.of(url), PATIENCE_SECONDS)
        shared = RefereeRun(server, "", "/v1/chat/completions", limit=limit, names_apis=names_apis)
        shared.model = await find_model(shared)
        return await judge(shared, [api], API_CHECKS[api]())


@pytest.mark.parametrize("api", FAULTS)
async def test_a_server_without_a_fault_passes_every_check(api: str) -> None:
    assert [(r.check.id, r.reason) for r in await _judged(api) if r.outcome is not CheckOutcome.PASSED] == []


@pytest.mark.parametrize(("api", "fault"), CASES)
async def test_a_fault_is_found_by_the_check_that_names_it_and_by_no_other(api: str, fault: str) -> None:
    found = {r.check.id for r in await _judged(api, fault) if r.outcome is CheckOutcome.FAILED}
    assert found == {f"{api}.{name}" for name in FAULTS[api][fault]}


@pytest.mark.parametrize("api", FAULTS)
def test_each_check_has_a_fault_that_it_alone_finds(api: str) -> None:
    alone = {f"{api}.{name}" for names in FAULTS[api].values() if len(names) == 1 for name in names}
    assert alone == {check.id for check in API_CHECKS[api]()}
    assert alone <= {check.id for check in all_checks()}


@pytest.mark.parametrize("api", FAULTS)
async def test_an_api_that_is_named_and_absent_cannot_be_judged_and_core_does_not_hold(api: str) -> None:
    results = await _judged(api, "route missing")
    assert {(r.outcome, r.cause) for r in results} == {(CheckOutcome.CANNOT_JUDGE, Cause.ABSENT)}
    assert all("does not serve it" in r.reason for r in results)
    assert not core_holds(results)


async def test_an_api_that_is_absent_and_not_named_is_no_fault() -> None:
    results = await _judged("files", "route missing", names_apis=False)
    assert {r.cause for r in results} == {Cause.NOT_OFFERED}
    assert core_holds(results)


async def test_a_batch_that_does_not_end_in_time_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.cli.referee.apis.batches.WAIT_SECONDS", 0.05)
    results = {r.check.id: r for r in await _judged("files", "batch never ends")}
    assert results["files.batch.end"].cause is Cause.TIME
    assert results["files.upload"].outcome is CheckOutcome.PASSED


async def test_what_the_limit_of_the_run_cuts_off_is_reported_as_such() -> None:
    results = await _judged("files", "batch never ends", limit=0.5)
    late = {r.check.id: r for r in results if r.cause is Cause.TIME}
    assert "files.batch.end" in late
    assert late["files.batch.end"].reason == "the run's 0.5 s were over first (--limit)"
    assert not core_holds([late["files.batch.end"]])

"""`dynamo conformance URL` over a server with one named fault each."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from xml.etree import ElementTree

import pytest
from jsonschema import Draft202012Validator

from dynamo.cli.bench.targets import Target
from dynamo.cli.referee import report
from dynamo.cli.referee.apis import API_CHECKS
from dynamo.cli.referee.checks import Broken, CannotJudge, Cause, Check, CheckOutcome, Level, Probe, RefereeRun, Result
from dynamo.cli.referee.command import RefereeFlags, all_checks, find_model, judge, main, read_key
from dynamo.cli.referee.exchange import Server, ServerAnswer
from dynamo.cli.referee.turns import found_by
from dynamo.cli.usage import UsageError
from support.faulty_server import faulty_server
from support.patience import PATIENCE_SECONDS

# The checks that find a fault, without the name of the API. Where there are several, the others are its consequences.
FAULTS = {
    "id missing": {"answer.shape"},
    "index wrong": {"answer.index", "n", "stream.chunk-shape"},
    "finish_reason unknown": {
        "answer.finish-reason",
        "max-tokens",
        "stop",
        "stream.finish-last",
        "agent.tool-choice-required",
    },
    "answer not as JSON": {"answer.content-type"},
    "usage missing": {"usage.adds-up"},
    "usage does not add up": {"usage.adds-up", "stream.usage-last"},
    "streamed usage differs": {"usage.streamed-equal"},
    "max_tokens overrun": {"max-tokens"},
    "length called stop": {"max-tokens"},
    "stop string shown": {"stop"},
    "stop called length": {"stop"},
    "choices of n alike": {"n"},
    "second choice unfinished": {"n"},
    "logprobs too few": {"logprobs"},
    "stream not as events": {"stream.content-type"},
    "stream cached": {"stream.cache-control"},
    "chunk not JSON": {"stream.chunk-shape"},
    "several ids": {"stream.chunk-shape"},
    "object of a chunk wrong": {"stream.chunk-shape"},
    "role missing": {"stream.role-first"},
    "finish_reason missing": {"stream.finish-last"},
    "finish_reason twice": {"stream.finish-last"},
    "wrong order of events": {"stream.finish-last"},
    "usage chunk missing": {"stream.usage-last", "agent.tool-usage"},
    "usage chunk with choices": {"stream.usage-last"},
    "empty choice beside the usage": {"stream.usage-last"},
    "[DONE] missing": {"stream.done-last"},
    "[DONE] early": {"stream.done-last"},
    "character broken": {"stream.unicode"},
    "bytes of a character apart": {"stream.unicode"},
    "200 for an unknown model": {"error.unknown-model"},
    "500 for malformed JSON": {"error.malformed-json"},
    "wrong type taken": {"error.wrong-type", "error.param"},
    "wrong param named": {"error.param"},
    "422 for a missing prompt": {"error.missing-prompt"},
    "error as HTML": {"error.shape", "limit.prompt"},
    "error as text": {"error.shape", "limit.prompt"},
    "limit not named": {"limit.prompt"},
    "tool arguments not JSON": {"tool-call", "stream.tool-deltas"},
    "tool id twice": {"stream.tool-deltas"},
    "schema broken": {"json-schema"},
    "results in another order refused": {"agent.tool-results"},
    "result parts refused": {"agent.tool-result-parts"},
    "parts counted differently": {"agent.content-parts"},
    "tool called in spite of none": {"agent.tool-choice-none"},
    "required ignored": {"agent.tool-choice-required"},
    "required called stop": {"agent.tool-choice-required"},
    "no usage of streamed calls": {"agent.tool-usage"},
    "thoughts in the text": {"agent.reasoning-apart"},
    "thoughts in the streamed text": {"agent.reasoning-streamed"},
    "long conversation refused": {"agent.long-conversation"},
    "developer refused": {"agent.developer-role"},
    "metadata refused": {"agent.known-members"},
    "unknown member is 500": {"agent.unknown-member"},
    "seed refused": {"seed"},
    "no request id": {"request-id"},
    "list without object": {"models.list"},
    "another model": {"models.retrieve"},
    "any model found": {"models.unknown"},
    "no length": {"http.content-length"},
    "HEAD is 500": {"http.head"},
    "OPTIONS is 500": {"http.options"},
    "large headers are 500": {"http.large-header"},
    "connection closed": {"http.keep-alive"},
    "connection closed after an error": {"http.keep-alive-after-error"},
    "chunked body refused": {"http.chunked-body"},
    "404 for a method": {"http.method"},
    "no 100": {"http.expect-continue"},
    "not healthy": {"operator.health"},
    "not ready": {"operator.ready"},
    "metrics not Prometheus": {"operator.metrics"},
    "cancelled work goes on": {"cancel.frees-server"},
}
# What a server may do though others do not, and the checks that cannot judge it.
ALLOWED = {
    "stream without Cache-Control": set(),
    "param not named": {"error.param"},
    "path named": set(),
    "unknown member named": set(),
    "load counted after the headers": set(),
    "end announced after an error": {"http.keep-alive-after-error"},
    "no metrics": {"operator.metrics", "cancel.frees-server"},
}
ONLY_CHAT = {"stream.role-first", "tool-call", "stream.tool-deltas", "json-schema"}
NAMES = {check.id for check in all_checks()}


WAITS = {"no 100": "CONTINUE_SECONDS", "cancelled work goes on": "FREED_SECONDS"}
"""What a fault makes the referee wait for. All else comes at once, however busy the machine is."""


async def _judged(fault: str = "", apis: tuple[str, ...] = ("chat", "completions")) -> list[Result]:
    async with faulty_server(fault) as url:
        shared = RefereeRun(Server(Target.of(url), PATIENCE_SECONDS), "", "/v1/chat/completions")
        shared.model = await find_model(shared)
        return await judge(shared, apis)


def _ids(names: set[str]) -> set[str]:
    return {n for name in names for n in (name, f"chat.{name}", f"completions.{name}") if n in NAMES}


async def test_a_server_without_a_fault_passes_every_check() -> None:
    judged = [r for r in await _judged() if r.outcome is not CheckOutcome.SKIPPED]
    assert [(r.check.id, r.reason) for r in judged if r.outcome is not CheckOutcome.PASSED] == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_found_by_the_check_that_names_it_and_by_no_other(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault in WAITS:
        monkeypatch.setattr(f"dynamo.cli.referee.server_checks.{WAITS[fault]}", 0.3)
    found = {r.check.id for r in await _judged(fault) if r.outcome is CheckOutcome.FAILED}
    assert found == _ids(FAULTS[fault])


def test_every_check_has_a_fault_that_it_finds() -> None:
    others = tuple(f"{name}." for name in API_CHECKS if name not in ("chat", "completions"))
    found = {name for names in FAULTS.values() for name in _ids(names)}
    assert {name for name in NAMES if not name.startswith(others)} == found


@pytest.mark.parametrize("allowed", ALLOWED)
async def test_what_the_documents_allow_is_no_fault(allowed: str) -> None:
    results = await _judged(allowed)
    assert [(r.check.id, r.reason) for r in results if r.outcome is CheckOutcome.FAILED] == []
    found = {r.check.id for r in results if r.outcome is CheckOutcome.CANNOT_JUDGE}
    assert found == _ids(ALLOWED[allowed])


async def test_checks_of_an_api_that_is_not_asked_for_are_skipped() -> None:
    skipped = {r.check.id for r in await _judged(apis=("chat",)) if r.outcome is CheckOutcome.SKIPPED}
    others = tuple(f"{name}." for name in API_CHECKS if name != "chat")
    assert skipped == {name for name in NAMES if name.startswith(others)}


async def test_the_reports_say_the_same() -> None:
    results = await _judged("[DONE] missing")
    made = json.loads(json.dumps(report.as_json(results, "http://host", "faulty")))
    assert made["version"] == 2
    Draft202012Validator(report.SCHEMA).validate(made)
    assert made["core_passed"] is False
    failed = {c["id"] for c in made["checks"] if c["outcome"] == "failed"}
    suite = ElementTree.fromstring(report.as_junit(results))
    assert {case.get("name") for case in suite if case.find("failure") is not None} == failed
    page = report.as_html(results, "http://host/<x>", "faulty")
    assert page.count("class='failed'") == len(failed)
    assert "<x>" not in page
    assert "src=" not in page


def test_evidence_is_cut_and_without_the_key() -> None:
    probe = Probe(RefereeRun(Server(Target.of("http://host"), 1), "m", "/v1/completions", "sk-secret"))
    probe.note("Bearer sk-secret", ServerAnswer(200, {}, b"sk-secret " * 10_000))
    assert "sk-secret" not in probe.sent + probe.seen
    assert len(probe.seen) < 1600


async def test_a_reason_is_without_the_key_that_the_server_repeats() -> None:
    async def refused(_: Probe) -> None:
        raise Broken("x" * 490 + "the key sk-secret-and-long is not known")

    check = Check("a", Level.CORE, "major", "", "", refused)
    shared = RefereeRun(Server(Target.of("http://host"), 1), "m", "/v1/completions", "sk-secret-and-long")
    probe = Probe(shared)
    found = await found_by(check, lambda: check.run(probe), probe)
    assert "sk-" not in found.reason
    assert found.reason.startswith("x" * 490)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["http://127.0.0.1:1/v1"], "cannot be reached"),
        (["http://127.0.0.1:1/v1", "--api", "speech"], "there is no 'speech'"),
        (["http://127.0.0.1:1/v1", "--key", "a\nb"], "has no valid key"),
        (["http://127.0.0.1:1/v1", "--key", "a", "--key-file", "b"], "exclude each other"),
        (["http://127.0.0.1:1/v1", "--key-file", "/no/such/file"], "cannot be read"),
        ([], "URL is missing"),
    ],
)
def test_an_error_of_use_is_one_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        main(argv)


async def test_a_server_that_never_answers_is_named_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system takes the connection
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UsageError, match="cannot be reached: no answer in time"):
            await find_model(RefereeRun(Server(Target.of(url), 0.05), "", "/v1/chat/completions"))


async def _result(raised: Exception | None, level: Level = Level.CORE) -> Result:
    async def run(_: Probe) -> None:
        if raised is not None:
            raise raised

    check = Check("a", level, "major", "", "", run)
    probe = Probe(RefereeRun(Server(Target.of("http://host"), 1), "m", "/v1/completions"))
    return await found_by(check, lambda: check.run(probe), probe)


@pytest.mark.parametrize(
    ("raised", "holds"),
    [
        (None, True),
        (Broken("no"), False),
        (CannotJudge("the model ended its answer"), True),
        (CannotJudge("no such option", Cause.NOT_OFFERED), True),
        (CannotJudge("no such API", Cause.ABSENT), False),
        (CannotJudge("no usage to compare", Cause.SERVER), False),
        (CannotJudge("the time is over", Cause.TIME), False),
    ],
)
async def test_core_holds_only_where_the_server_kept_no_core_check_from_being_judged(
    raised: Exception | None, holds: bool
) -> None:
    found = await _result(raised)
    assert report.as_json([found], "http://host", "m")["core_passed"] is holds
    assert report.core_holds([await _result(raised, Level.AGENT)])


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-of-a-file\n")
    assert read_key(RefereeFlags(key_file=file)) == "sk-of-a-file"
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_key(RefereeFlags(key_file=file))


def test_the_page_names_each_member_of_the_report_and_each_cause(pytestconfig: pytest.Config) -> None:
    page = Path(pytestconfig.rootpath, "docs", "conformance.md").read_text(encoding="utf-8")
    members = [*report.SCHEMA["properties"], *report.SCHEMA["properties"]["checks"]["items"]["properties"]]
    assert [name for name in [*members, *Cause] if f"`{name}`" not in page] == []


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    assert printed == report.SCHEMA


def test_the_page_has_the_table_that_list_prints(
    capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    assert main(["--list"]) == 0
    page = Path(pytestconfig.rootpath, "docs", "conformance.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page

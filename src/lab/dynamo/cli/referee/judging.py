"""A run of the referee: which checks, a few at once, and what each found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from dynamo.cli.referee.apis import API_CHECKS, embeddings, messages, responses
from dynamo.cli.referee.checks import Check, CheckOutcome, Probe, RefereeRun, Result
from dynamo.cli.referee.exchange import member
from dynamo.cli.referee.server_checks import ALONE, server_checks
from dynamo.cli.referee.text_checks import CHAT, COMPLETIONS
from dynamo.cli.referee.turns import RunTurns
from dynamo.cli.usage import UsageError

# Where the checks of the server send a small request: the first of these that is judged, else chat.
_PATHS: Final = {
    "chat": CHAT.path,
    "completions": COMPLETIONS.path,
    "responses": responses.PATH,
    "messages": messages.PATH,
    "embeddings": embeddings.PATH,
}


def server_path(apis: Sequence[str]) -> str:
    """Return the path of the API that the checks of the server use."""
    return next((path for name, path in _PATHS.items() if name in apis), CHAT.path)


def all_checks() -> list[Check]:
    """Return every check, those of the server first."""
    return [*server_checks(), *(check for made in API_CHECKS.values() for check in made())]


async def find_model(shared: RefereeRun) -> str:
    """Return the first model of the list. Raises UsageError where the server cannot be reached or lists none."""
    try:
        answer = await Probe(shared).get("/v1/models")
    except (OSError, TimeoutError) as error:
        raise UsageError(
            f"{shared.server.target.url} cannot be reached: {str(error) or 'no answer in time'}"
        ) from error
    if shared.model:
        return shared.model
    found = member(answer.json(), "data", 0, "id")
    if not isinstance(found, str):
        raise UsageError(f"{shared.server.target.url}/v1/models names no model ({answer.message}); use --model")
    return found


async def judge(shared: RefereeRun, apis: Sequence[str], checks: Sequence[Check] = ()) -> list[Result]:
    """Run checks, without any every one; those of an API that `apis` does not name are skipped."""
    checks = checks or all_checks()
    turns = RunTurns(shared.limit)

    async def one(check: Check) -> Result:
        area = check.id.partition(".")[0]
        if area in API_CHECKS and area not in apis:
            return Result(check, CheckOutcome.SKIPPED, f"--api does not name {area}", "", "", 0.0)
        probe = Probe(shared)
        return await turns.judge(check, lambda: check.run(probe), probe)

    async with asyncio.TaskGroup() as group:
        tasks = {check.id: group.create_task(one(check)) for check in checks if check.id != ALONE}
    results = {name: task.result() for name, task in tasks.items()}
    return [results.get(check.id) or await one(check) for check in checks]

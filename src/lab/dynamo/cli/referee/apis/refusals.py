"""Checks of refusals, which the APIs with JSON bodies have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import UNKNOWN


@dataclass(frozen=True, slots=True)
class Refusals:
    """What an API refuses: where it is, the form of its bodies, and what its reference promises."""

    path: str
    body: Callable[[str], dict[str, Json]]  # by the name of a model
    number: str  # a member that is a number
    required: str  # a member that must be there
    page: str  # of the reference
    errors_page: str
    check_error: Callable[[Json], None]
    unknown_model: tuple[int, ...] = (404,)
    headers: Callable[[Probe], Mapping[str, str]] = lambda _: {}
    model: Callable[[Probe], str] = lambda probe: probe.model


def openai_error(answer: Json) -> None:
    """Demand the error object of OpenAI's APIs."""
    error = member(answer, "error")
    demand(isinstance(error, dict), "the body of the refusal is not JSON with an object 'error'")
    demand(isinstance(error.get("message"), str) and error["message"], "error.message is not a text")
    demand(isinstance(error.get("type"), str), "error.type is not a text")


def refusal_rows(api: Refusals) -> list[Row]:
    """Return the checks of what an API refuses."""

    async def send(probe: Probe, body: dict[str, Json] | bytes) -> ServerAnswer:
        return await probe.post(api.path, body, more=api.headers(probe))

    def demand_status(answer: ServerAnswer, *wanted: int) -> None:
        named = " or ".join(map(str, wanted))
        demand(answer.status in wanted, f"expected status {named}, got {answer.message}")

    async def check_unknown_model(probe: Probe) -> None:
        demand_status(await send(probe, api.body(UNKNOWN)), *api.unknown_model)

    async def check_bad_json(probe: Probe) -> None:
        demand_status(await send(probe, b'{"model": '), 400)

    async def check_wrong_type(probe: Probe) -> None:
        demand_status(await send(probe, {**api.body(api.model(probe)), api.number: "many"}), 400)

    async def check_missing(probe: Probe) -> None:
        demand_status(await send(probe, _without(api.body(api.model(probe)), api.required)), 400)

    async def check_shape(probe: Probe) -> None:
        answer = await send(probe, _without(api.body(api.model(probe)), api.required))
        if answer.status < 400:
            raise CannotJudge(f"the server does not refuse a request without {api.required}", Cause.SERVER)
        api.check_error(answer.json())

    core, page, errors = Level.CORE, api.page, api.errors_page
    named = " or ".join(map(str, api.unknown_model))
    return [
        ("error.unknown-model", check_unknown_model, core, "major", f"{errors}: A model that does not exist is {named}", f"Refuse it with {api.unknown_model[-1]}"),
        ("error.malformed-json", check_bad_json, core, "major", f"{errors}: A body that is not JSON is 400", "Refuse it with 400"),
        ("error.wrong-type", check_wrong_type, core, "major", f"{page}: {api.number} is a number; anything else is 400", "Refuse it with 400"),
        ("error.missing-member", check_missing, core, "major", f"{page}: {api.required} is required; without it the status is 400", "Refuse it with 400"),
        ("error.shape", check_shape, core, "major", f"{errors}: A refusal has the error object of the API", "Write errors as JSON of that form"),
    ]  # fmt: skip


def _without(body: dict[str, Json], name: str) -> dict[str, Json]:
    return {key: value for key, value in body.items() if key != name}

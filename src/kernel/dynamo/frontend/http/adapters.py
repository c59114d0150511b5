"""`/v1/loras`: adapters of all workers of a model, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from dynamo.frontend.base.asgi import BodyBudget, ClientGone, Receive, Scope, Send, first_headers, read_body, reply
from dynamo.frontend.models.adapters import AdapterKeeper, WorkerAnswer
from dynamo.protocol.openai.errors import RequestRejected

ADAPTERS_PATH: Final = "/v1/loras"
MAX_BODY_BYTES: Final = 64 * 1024
MAX_CHARS: Final = 4096


class AdapterSource(Struct, forbid_unknown_fields=True):
    """Where an adapter is from."""

    uri: str


class AdapterLoad(Struct, forbid_unknown_fields=True):
    """The body of a load."""

    base_model: str
    lora_name: str
    source: AdapterSource | str


class AdaptersRoute:
    """`GET` lists, `POST` loads, `DELETE /v1/loras/{name}` unloads."""

    def __init__(self, keeper: AdapterKeeper, budget: BodyBudget) -> None:
        self._keeper, self._budget = keeper, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            match scope["method"]:
                case "GET":
                    adapters = self._keeper.listed()
                    status, answer = 200, {"status": "success", "loras": adapters, "count": len(adapters)}
                case "POST":
                    body = await read_body(first_headers(scope), receive, MAX_BODY_BYTES, self._budget)
                    status, answer = await self._load(body)
                case _:
                    status, answer = await self._unload(unquote(scope["path"].removeprefix(ADAPTERS_PATH).lstrip("/")))
        except ClientGone:
            return
        except RequestRejected as rejected:
            status, answer = rejected.status, _refusal(str(rejected))
        await reply(send, status, msgspec.json.encode(answer))

    async def _load(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            given = msgspec.json.decode(body, type=AdapterLoad)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return 400, _refusal(f"the body is not understood: {error}")
        source = given.source if isinstance(given.source, str) else given.source.uri
        for field, value in (("base_model", given.base_model), ("lora_name", given.lora_name), ("source", source)):
            if not 0 < len(value) <= MAX_CHARS:
                return 400, _refusal(f"{field} must have 1 to {MAX_CHARS} characters")
        if not self._keeper.is_base(given.base_model):
            return 404, _refusal(f"no worker serves the model {given.base_model!r}")
        if self._keeper.is_taken(given.lora_name):
            return 409, _refusal(f"lora_name {given.lora_name!r} is the name of a model that is not an adapter")
        others = self._keeper.bases(given.lora_name) - {given.base_model}
        if others:
            return 409, _refusal(f"lora_name {given.lora_name!r} is an adapter of {sorted(others)[0]!r}")
        try:
            answers = await self._keeper.load(given.base_model, given.lora_name, source)
        except ValueError as error:
            return 409, _refusal(str(error))
        return _judged(given.lora_name, answers)

    async def _unload(self, name: str) -> tuple[int, dict[str, Any]]:
        answers = await self._keeper.unload(name)
        if not answers:
            known = ", ".join(entry["lora_name"] for entry in self._keeper.listed()[:16]) or "none"
            return 404, _refusal(f"no worker has an adapter {name!r}; loaded are: {known}")
        return _judged(name, answers)


def _judged(name: str, answers: Sequence[WorkerAnswer]) -> tuple[int, dict[str, Any]]:
    """Return 200 where every worker did it, else 502: the change holds for some of them only."""
    failed = [answer for answer in answers if answer.status != "success"]
    status = "success" if not failed else "partial" if len(failed) < len(answers) else "error"
    body: dict[str, Any] = {"status": status, "lora_name": name, "workers": answers}
    if failed:
        body["message"] = failed[0].message
    return (502 if failed else 200), body


def _refusal(message: str) -> dict[str, Any]:
    return {"status": "error", "message": message}

"""Checks of the APIs that generate text. Chat and completions have these in common."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, Run, demand, demand_route, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member

TOKENS: Final = 24  # of most answers
FINISHES: Final = ("stop", "length", "tool_calls", "content_filter", "function_call")
PROMPT: Final = "Write something about the sea, the caf\u00e9 and \u65e5\u672c."
LONG_WORDS: Final = 200_000  # of a prompt that is to be too long
UNKNOWN: Final = "no-such-model-of-the-referee"
_FRESH: Final = re.compile(r"(?:s-maxage|max-age)\s*=\s*\"?(\d+)")


@dataclass(frozen=True, slots=True)
class TextApi:
    """One API: where it is, and the form of its bodies."""

    name: str
    path: str
    page: str  # of OpenAI's reference
    whole: str  # the `object` of an answer
    piece: str  # the `object` of a chunk
    prompt_member: str

    def body(self, model: str, prompt: str = PROMPT, **more: Json) -> dict[str, Json]:
        """Build a request."""
        asked: Json = [{"role": "user", "content": prompt}] if self.name == "chat" else prompt
        return {"model": model, self.prompt_member: asked, "max_tokens": TOKENS, "temperature": 0, **more}

    def text(self, choice: Json, part: str = "message") -> str:
        """Return the text of a choice, thoughts included."""
        if self.name != "chat":
            return member(choice, "text") or ""
        said = member(choice, part)
        return "".join(member(said, name) or "" for name in ("reasoning_content", "reasoning", "content"))


CHAT: Final = TextApi("chat", "/v1/chat/completions", "Chat", "chat.completion", "chat.completion.chunk", "messages")
COMPLETIONS: Final = TextApi(
    "completions", "/v1/completions", "Completions", "text_completion", "text_completion", "prompt"
)


async def whole(api: TextApi, probe: Probe, **more: Json) -> ServerAnswer:
    """Request a whole answer."""
    return served(await probe.post(api.path, api.body(probe.model, **more)))


async def stream(api: TextApi, probe: Probe, **more: Json) -> ServerAnswer:
    """Request a stream with usage."""
    body = api.body(probe.model, stream=True, stream_options={"include_usage": True}, **more)
    return served(await probe.post(api.path, body))


def pieces(answer: ServerAnswer) -> list[Json]:
    """Return the chunks of a stream, as far as they can be read."""
    found = []
    for line in answer.body.decode(errors="replace").splitlines():
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            try:
                found.append(json.loads(line[5:]))
            except ValueError:
                continue  # the check of the chunks' shape finds it
    return found


async def check_shape(api: TextApi, probe: Probe) -> None:
    answer = (await whole(api, probe)).json()
    demand(isinstance(answer, dict), "the answer is not a JSON object")
    demand(answer.get("object") == api.whole, f"object is {answer.get('object')!r}, not {api.whole!r}")
    demand(isinstance(answer.get("id"), str) and answer["id"], "id is not a text")
    demand(isinstance(answer.get("created"), int), "created is not a whole number")
    demand(isinstance(answer.get("model"), str), "model is not a text")
    choices = answer.get("choices")
    demand(isinstance(choices, list) and choices, "choices is not a list with a choice")
    if api.name == "chat":
        demand(member(choices, 0, "message", "role") == "assistant", "the message's role is not 'assistant'")
    else:
        demand(isinstance(member(choices, 0, "text"), str), "the choice has no text")


async def check_index(api: TextApi, probe: Probe) -> None:
    demand(member((await whole(api, probe)).json(), "choices", 0, "index") == 0, "the only choice's index is not 0")


async def check_finish(api: TextApi, probe: Probe) -> None:
    reason = member((await whole(api, probe)).json(), "choices", 0, "finish_reason")
    demand(reason in FINISHES, f"finish_reason is {reason!r}")


async def check_json_type(api: TextApi, probe: Probe) -> None:
    kind = (await whole(api, probe)).headers.get("content-type", "")
    demand(kind.startswith("application/json"), f"Content-Type is {kind!r}")


def _usage(usage: Json) -> tuple[int, int]:
    numbers = [member(usage, f"{name}_tokens") for name in ("prompt", "completion", "total")]
    demand(all(isinstance(n, int) and n >= 0 for n in numbers), f"usage is {usage!r}")
    demand(numbers[0] + numbers[1] == numbers[2], f"{numbers[0]} + {numbers[1]} is not {numbers[2]}")
    return numbers[0], numbers[1]


async def check_usage(api: TextApi, probe: Probe) -> None:
    _usage(member((await whole(api, probe)).json(), "usage"))


async def check_max_tokens(api: TextApi, probe: Probe) -> None:
    answer = (await whole(api, probe, max_tokens=2)).json()
    made, reason = member(answer, "usage", "completion_tokens"), member(answer, "choices", 0, "finish_reason")
    if not isinstance(made, int):
        raise CannotJudge("the answer has no usage.completion_tokens", Cause.SERVER)
    demand(made <= 2, f"{made} tokens came where max_tokens is 2")
    if reason == "stop" and made < 2:
        raise CannotJudge("the model ended its answer before the limit")
    demand(reason == "length", f"finish_reason is {reason!r}, not 'length'")


async def check_stop(api: TextApi, probe: Probe) -> None:
    first = member((await whole(api, probe)).json(), "choices", 0)
    text = member(first, "message", "content") if api.name == "chat" else member(first, "text")
    if not isinstance(text, str) or len(text.strip()) < 8:
        raise CannotJudge("the model's answer is too short to stop it in the middle")
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = member((await whole(api, probe, stop=[stop])).json(), "choices", 0)
    shown = (member(cut, "message", "content") if api.name == "chat" else member(cut, "text")) or ""
    demand(stop not in shown, f"the stop string {stop!r} is in the answer")
    if not text.startswith(shown):
        raise CannotJudge("two answers to the same request differ")
    reason = member(cut, "finish_reason")
    demand(reason == "stop", f"finish_reason is {reason!r}, not 'stop'")
    demand(shown == text[: text.index(stop)], f"text before the stop string {stop!r} is missing")


async def check_choices(api: TextApi, probe: Probe) -> None:
    body = api.body(probe.model, n=2, temperature=1)
    answer = served(await probe.post(api.path, body), is_optional=True).json()
    choices = member(answer, "choices") or []
    found = [member(choice, "index") for choice in choices]
    demand(sorted(map(str, found)) == ["0", "1"], f"the indices of two choices are {found}")
    reasons = [member(choice, "finish_reason") for choice in choices]
    demand(all(reasons), f"the finish reasons of two choices are {reasons}")


async def check_logprobs(api: TextApi, probe: Probe) -> None:
    more: dict[str, Json] = {"logprobs": True, "top_logprobs": 2} if api.name == "chat" else {"logprobs": 2}
    answer = served(await probe.post(api.path, api.body(probe.model, **more)), is_optional=True).json()
    found, made = member(answer, "choices", 0, "logprobs"), member(answer, "usage", "completion_tokens")
    if found is None:
        raise CannotJudge("the server gives no logprobs", Cause.NOT_OFFERED)
    values = (
        [member(entry, "logprob") for entry in member(found, "content") or []]
        if api.name == "chat"
        else member(found, "token_logprobs") or []
    )
    demand(values, f"logprobs has no entry in {'content' if api.name == 'chat' else 'token_logprobs'}")
    demand(all(isinstance(v, int | float) and v <= 0 for v in values), f"not all are numbers up to 0: {values[:5]}")
    if api.name == "chat":
        demand(all(len(member(e, "top_logprobs") or []) <= 2 for e in found["content"]), "more than two top_logprobs")
    reason = member(answer, "choices", 0, "finish_reason")
    close = (0, 1) if reason == "stop" else (0,)  # the token that ends an answer may be counted
    thinks = any(member(answer, "choices", 0, "message", name) for name in ("reasoning_content", "reasoning"))
    if isinstance(made, int) and not thinks:
        demand(made - len(values) in close, f"{len(values)} entries for {made} tokens")


async def check_same(api: TextApi, probe: Probe) -> None:
    texts = []
    for _ in range(2):
        body = api.body(probe.model, seed=7)
        answer = served(await probe.post(api.path, body, is_fresh=True), is_optional=True).json()
        texts.append(api.text(member(answer, "choices", 0)))
    if texts[0] != texts[1]:
        raise CannotJudge("the answers differ, which the reference allows")


async def check_stream_headers(api: TextApi, probe: Probe) -> None:
    kind = (await stream(api, probe)).headers.get("content-type", "")
    demand(kind.startswith("text/event-stream"), f"Content-Type is {kind!r}")


async def check_stream_cache(api: TextApi, probe: Probe) -> None:
    found = (await stream(api, probe)).headers.get("cache-control", "").lower()
    # Without the header nothing is kept: the answer to a POST is only kept where it names how long it is fresh.
    is_fresh = any(int(seconds) for seconds in _FRESH.findall(found))
    is_kept = is_fresh and not any(word in found for word in ("no-cache", "no-store", "private"))
    demand(not is_kept, f"Cache-Control is {found!r}")


async def check_request_id(api: TextApi, probe: Probe) -> None:
    demand((await whole(api, probe)).headers.get("x-request-id"), "there is no header x-request-id")


async def check_stream_shape(api: TextApi, probe: Probe) -> None:
    try:
        chunks = (await stream(api, probe)).chunks()
    except UnicodeDecodeError:
        raise CannotJudge("the stream is not UTF-8", Cause.SERVER) from None
    except ValueError as error:
        demand(False, f"the data of an event is not JSON: {error}")
        return
    demand(chunks, "the stream has no chunk")
    for chunk in chunks:
        demand(member(chunk, "object") == api.piece, f"object is {member(chunk, 'object')!r}, not {api.piece!r}")
        demand(isinstance(member(chunk, "choices"), list), "a chunk has no list of choices")
    demand(len({str(member(chunk, "id")) for chunk in chunks}) == 1, "the chunks have several ids")
    indices = {str(member(choice, "index")) for chunk in chunks for choice in chunk["choices"]}
    demand(indices <= {"0"}, f"the index of the only choice is {sorted(indices)}")


async def check_role(api: TextApi, probe: Probe) -> None:
    first = next((c for chunk in pieces(await stream(api, probe)) for c in member(chunk, "choices") or []), None)
    demand(member(first, "delta", "role") == "assistant", "the first delta has no role 'assistant'")


async def check_stream_finish(api: TextApi, probe: Probe) -> None:
    chunks = pieces(await stream(api, probe))
    choices = [choice for chunk in chunks for choice in member(chunk, "choices") or []]
    at = [n for n, choice in enumerate(choices) if member(choice, "finish_reason") is not None]
    demand(at, "no chunk has a finish_reason")
    demand(len(at) == 1, f"{len(at)} chunks have a finish_reason")
    # An empty choice beside the usage is what stream.usage-last finds.
    later = [
        choice for choice in choices[at[0] + 1 :] if api.text(choice, "delta") or member(choice, "delta", "tool_calls")
    ]
    demand(not later, "text comes after the finish_reason")
    demand(choices[at[0]]["finish_reason"] in FINISHES, f"finish_reason is {choices[at[0]]['finish_reason']!r}")


async def check_stream_usage(api: TextApi, probe: Probe) -> None:
    chunks = pieces(await stream(api, probe))
    last = chunks[-1] if chunks else None
    demand(member(last, "usage"), "the last chunk has no usage, which include_usage asks for")
    demand(member(last, "choices") == [], "the chunk with usage has choices")
    _usage(member(last, "usage"))


async def check_usage_equal(api: TextApi, probe: Probe) -> None:
    streamed = next((u for c in pieces(await stream(api, probe)) if (u := member(c, "usage"))), None)
    alone = (await whole(api, probe)).json()
    usages = [streamed, member(alone, "usage")]
    if not all(isinstance(member(u, "prompt_tokens"), int) for u in usages):
        raise CannotJudge("one of the answers has no usage", Cause.SERVER)
    prompts = [member(u, "prompt_tokens") for u in usages]
    demand(prompts[0] == prompts[1], f"prompt_tokens is {prompts[0]} streamed and {prompts[1]} not streamed")
    if _streamed_text(api, await stream(api, probe)) != api.text(member(alone, "choices", 0)):
        raise CannotJudge("the two answers differ, so their completion_tokens may")
    made = [member(u, "completion_tokens") for u in usages]
    demand(made[0] == made[1], f"completion_tokens is {made[0]} streamed and {made[1]} not streamed")


def _streamed_text(api: TextApi, answer: ServerAnswer) -> str:
    return "".join(api.text(c, "delta") for chunk in pieces(answer) for c in member(chunk, "choices") or [])


async def check_done(api: TextApi, probe: Probe) -> None:
    lines = [line[5:].strip() for line in (await stream(api, probe)).body.splitlines() if line.startswith(b"data:")]
    demand(b"[DONE]" in lines, "there is no data: [DONE]")
    demand(lines.index(b"[DONE]") == len(lines) - 1, "an event comes after [DONE]")


async def check_unicode(api: TextApi, probe: Probe) -> None:
    answer = await stream(api, probe)
    try:
        answer.body.decode()
    except UnicodeDecodeError as error:
        demand(False, f"the stream is not UTF-8: {error}")
    for chunk in pieces(answer):
        for choice in member(chunk, "choices") or []:
            text = api.text(choice, "delta")
            demand(not any("\ud800" <= c <= "\udfff" for c in text), f"half a character: {text!r}")
    replaced = _streamed_text(api, answer).count("\ufffd")
    alone = api.text(member((await whole(api, probe)).json(), "choices", 0)).count("\ufffd")
    demand(replaced <= alone, f"{replaced} characters are U+FFFD in the stream, and {alone} in the whole answer")


def refused(answer: ServerAnswer, status: int) -> Json:
    """Return the error object of a refusal."""
    demand(answer.status == status, f"expected status {status}, got {answer.status}")
    return member(answer.json(), "error")


async def check_unknown_model(api: TextApi, probe: Probe) -> None:
    refused(await probe.post(api.path, api.body(UNKNOWN)), 404)


async def check_bad_json(api: TextApi, probe: Probe) -> None:
    refused(await probe.post(api.path, b'{"model": '), 400)


async def check_wrong_type(api: TextApi, probe: Probe) -> None:
    refused(await probe.post(api.path, api.body(probe.model, max_tokens="many")), 400)


async def check_param(api: TextApi, probe: Probe) -> None:
    error = member((await probe.post(api.path, api.body(probe.model, max_tokens="many"))).json(), "error")
    named = member(error, "param")
    if named is None:
        raise CannotJudge("the error names no member, which the reference allows")
    # The end of a path names it, too, such as body.max_tokens.
    demand(str(named).rpartition(".")[2] == "max_tokens", f"error.param is {named!r}, not 'max_tokens'")


async def check_missing(api: TextApi, probe: Probe) -> None:
    refused(await probe.post(api.path, {"model": probe.model, "max_tokens": 2}), 400)


async def check_error_shape(api: TextApi, probe: Probe) -> None:
    answer = await probe.post(api.path, {"model": probe.model, "max_tokens": 2})
    if answer.status < 400:
        raise CannotJudge("the server does not refuse a request without its prompt", Cause.SERVER)
    error = member(answer.json(), "error")
    demand(isinstance(error, dict), "the body of the refusal is not JSON with an object 'error'")
    demand(isinstance(error.get("message"), str) and error["message"], "error.message is not a text")
    demand(isinstance(error.get("type"), str), "error.type is not a text")


async def check_too_long(api: TextApi, probe: Probe) -> None:
    answer = await probe.post(api.path, api.body(probe.model, "sea " * LONG_WORDS, max_tokens=1))
    if answer.status in (200, 413):
        raise CannotJudge(f"status {answer.status}: the prompt fits, or another limit comes first", Cause.NOT_OFFERED)
    demand(answer.status == 400, f"expected status 400, got {answer.status}")
    demand(any(c.isdigit() for c in member(answer.json(), "error", "message") or ""), "the message names no limit")


_Row = tuple[str, Callable[[TextApi, Probe], Awaitable[None]], Level, str, str, str]
_CORE, _AGENT = Level.CORE, Level.AGENT
# Name, check, level, severity, what the reference promises (or another source, in brackets), how to mend it.
_ROWS: Final[tuple[_Row, ...]] = (
    ("answer.shape", check_shape, _CORE, "major", "An answer has id, object, created, model and choices", "Write every required member with its type"),
    ("answer.index", check_index, _CORE, "major", "A choice has its place in the list as index", "Number the choices from 0"),
    ("answer.finish-reason", check_finish, _CORE, "major", "A choice has one of the named finish reasons", "Map the engine's reason onto a named one"),
    ("answer.content-type", check_json_type, _CORE, "minor", "A whole answer is JSON", "Send Content-Type: application/json"),
    ("usage.adds-up", check_usage, _CORE, "major", "Total tokens are the prompt's and the completion's", "Count each part once, and add them"),
    ("usage.streamed-equal", check_usage_equal, _CORE, "major", "Usage does not depend on streaming", "Count at one place for both forms"),
    ("max-tokens", check_max_tokens, _CORE, "major", "No more tokens than max_tokens are made, and the reason is length", "End at the limit with length"),
    ("stop", check_stop, _CORE, "major", "The text ends before a stop sequence, and the reason is stop", "Hold back text that may begin a stop string"),
    ("n", check_choices, _AGENT, "minor", "With n there are n whole choices with their indices", "Number the choices from 0, or refuse n with 400"),
    ("logprobs", check_logprobs, _AGENT, "minor", "With logprobs each token has one entry", "Keep one entry for each token of the answer"),
    ("seed", check_same, _AGENT, "minor", "The same seed may give the same answer", "Nothing: this is no duty"),
    ("request-id", check_request_id, _AGENT, "minor", "An answer names its request in x-request-id (page Debugging requests)", "Send x-request-id"),
    ("stream.content-type", check_stream_headers, _CORE, "major", "A stream is server-sent events", "Send Content-Type: text/event-stream"),
    ("stream.cache-control", check_stream_cache, _AGENT, "minor", "A stream is not kept by caches (RFC 9110 section 9.3.3)", "Send Cache-Control: no-store, or none"),
    ("stream.chunk-shape", check_stream_shape, _CORE, "major", "Chunks are JSON with one id, the object of chunks, and choices", "Write one JSON object for each event"),
    ("stream.finish-last", check_stream_finish, _CORE, "major", "The last chunk of a choice, and no other, has a finish reason", "Send finish_reason once, at the end"),
    ("stream.usage-last", check_stream_usage, _CORE, "major", "With include_usage a last chunk has usage and no choices", "Send it before [DONE]"),
    ("stream.done-last", check_done, _CORE, "major", "A stream ends with data: [DONE]", "Send data: [DONE] as the last event"),
    ("stream.unicode", check_unicode, _CORE, "major", "Text is whole in each chunk (RFC 8259 section 8.1)", "Hold bytes back until a character is whole"),
    ("error.unknown-model", check_unknown_model, _CORE, "major", "A model that does not exist is 404 (page Error codes)", "Refuse it with 404"),
    ("error.malformed-json", check_bad_json, _CORE, "major", "A body that is not JSON is 400 (page Error codes)", "Refuse it with 400"),
    ("error.wrong-type", check_wrong_type, _CORE, "major", "A member of a wrong type is 400 (page Error codes)", "Refuse it with 400"),
    ("error.param", check_param, _AGENT, "minor", "An error that names a member in param names the right one (page Error codes)", "Write the member's name into error.param"),
    ("error.missing-prompt", check_missing, _CORE, "major", "A missing required member is 400 (page Error codes)", "Refuse it with 400"),
    ("error.shape", check_error_shape, _CORE, "major", "An error is an object with message and type (page Error codes)", "Write errors as JSON"),
    ("limit.prompt", check_too_long, _AGENT, "major", "A prompt that is too long is 400 with the limit (page Error codes)", "Name the limit in the message"),
)  # fmt: skip


def rows_of(api: TextApi) -> list[Row]:
    """Return the checks that both APIs have."""

    def bound(run: Callable[[TextApi, Probe], Awaitable[None]]) -> Run:
        return partial(run, api)

    rows = list(_ROWS)
    if api.name == "chat":
        rows.append(
            ("stream.role-first", check_role, _CORE, "major", "The first delta names the role", "Send it first")
        )
    return [
        (name, bound(run), level, severity, f"OpenAI reference, {api.page}: {clause}", fix)
        for name, run, level, severity, clause, fix in rows
    ]


async def is_there(api: TextApi, probe: Probe) -> None:
    demand_route(probe, await probe.post(api.path, api.body(probe.model)))

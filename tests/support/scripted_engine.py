"""An engine that does what each request asks of it, for end-to-end tests. It writes down what happens to it.

A request brings its script as metadata (header `x-dynamo-meta-script`), a JSON list of steps:

    ["say", text, pace]       one token per byte of the text, `pace` seconds before each (optional)
    ["flood"]                 tokens without end
    ["wait"]                  until the request is stopped
    ["hang"]                  for ever: deaf to a stop
    ["until", path]           until this file exists; goes on
    ["raise", kind, message]  a typed or builtin exception, or ["raise", 422, message] for an HttpError
    ["yield", chunk]          whatever it is
    ["end", reason]           the terminal chunk; without one the stream ends "stop", or "length" at max_tokens
    ["return"]                without a terminal chunk
    ["stick"]                 as "wait", the first time that any worker comes here; goes on
    ["block", path]           blocks the event loop until this file exists
    ["die", signal]           the process sends itself this signal, the first time that any worker comes here; goes on
    ["perish", signal]        as "die", every time

A request that another worker had begun to answer (its prompt is longer than `Context.prompt_tokens`) goes on where the
script stood after as many tokens.

SCRIPTED_TOOL_PARSER and SCRIPTED_REASONING_PARSER are what its card says of its output, SCRIPTED_MAX_NUM_SEQS of what it runs
at once, SCRIPTED_BATCH_TOKENS of what it prefills at once, SCRIPTED_START_SECONDS is how long it takes to start,
SCRIPTED_ROLE is `prefill` or `decode` for one half of a pair, and SCRIPTED_SCRIPT what it does for requests without a script. A
request also brings a `x-dynamo-meta-tag` under which the journal, JSON lines in the file SCRIPTED_JOURNAL, can be searched.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator
from typing import Any, Self

from dynamo import errors
from dynamo.common.backend import EngineConfig, GenerateRequest, LLMEngine, WorkerConfig
from dynamo.contract.modes import DisaggregationMode
from dynamo.worker.run import run

MODEL = os.environ["SCRIPTED_MODEL"]
NAME = os.environ["SCRIPTED_NAME"]
ROLE = os.environ.get("SCRIPTED_ROLE", "agg")
MAX_NUM_SEQS = int(os.environ.get("SCRIPTED_MAX_NUM_SEQS", "0"))
BATCH_TOKENS = int(os.environ.get("SCRIPTED_BATCH_TOKENS", "0"))
DEFAULT_SCRIPT = os.environ.get("SCRIPTED_SCRIPT", '[["say", "Hello"]]')


class ScriptedEngine(LLMEngine):
    def __init__(self) -> None:
        self._journal = os.open(os.environ["SCRIPTED_JOURNAL"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._tokens = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        return cls(), WorkerConfig(
            namespace="e2e",
            component=MODEL if ROLE != "prefill" else f"{MODEL}-prefill",
            endpoint="generate",
            model_name=MODEL,
            served_model_name=MODEL,
            discovery_backend=os.environ.get("SCRIPTED_DISCOVERY", "file"),
            tool_call_parser=os.environ.get("SCRIPTED_TOOL_PARSER"),
            reasoning_parser=os.environ.get("SCRIPTED_REASONING_PARSER"),
            disaggregation_mode=DisaggregationMode(ROLE),
        )

    async def start(self, worker_id: int) -> EngineConfig:
        await asyncio.sleep(float(os.environ.get("SCRIPTED_START_SECONDS", "0")))
        config = EngineConfig(model=MODEL, context_length=1_000_000, max_num_seqs=MAX_NUM_SEQS or None)
        if BATCH_TOKENS:  # what routers with a queue want to know
            config.max_num_batched_tokens, config.kv_cache_block_size, config.total_kv_blocks = BATCH_TOKENS, 4, 1000
        return config

    async def register_prometheus(self, metrics: Any) -> None:
        metrics.register_prometheus_expfmt_callback(self._expose)

    def _expose(self) -> str:
        return f"# TYPE scripted_tokens_total counter\nscripted_tokens_total {self._tokens}\n"

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[Any, None]:
        routing = request.get("routing") or {}
        self._note(
            "generate",
            context,
            trace=context.trace_headers(),
            prompt=len(request["token_ids"]),
            priority=routing.get("priority"),
        )
        limit = (request.get("stop_conditions") or {}).get("max_tokens") or 10**9
        skipped = len(request["token_ids"]) - (context.prompt_tokens or len(request["token_ids"]))
        sent, last_at = 0, 0.0
        try:
            for verb, *operands in json.loads(context.metadata.get("script", DEFAULT_SCRIPT)):
                match verb:
                    case "say" | "flood":
                        text, pace = (b"x", 0.0) if verb == "flood" else (operands[0].encode(), [*operands, 0.0][1])
                        for token in _endless(text) if verb == "flood" else text:
                            if skipped:
                                skipped -= 1
                                continue
                            if pace:
                                await asyncio.sleep(pace)
                            if context.is_stopped():
                                self._note("stopped", context, sent=sent)
                                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                                return
                            sent += 1
                            self._tokens, last_at = self._tokens + 1, time.monotonic()
                            if sent == 1:
                                self._note("first", context)
                            if sent == limit:
                                yield self._chunk(request, token) | {"finish_reason": "length"}
                                return
                            yield self._chunk(request, token)
                    case "wait" | "stick":
                        if verb == "stick" and not self._is_first_here(context):
                            continue
                        await context.async_killed_or_stopped()
                        self._note("stopped", context, sent=sent)
                        yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                        return
                    case "hang":
                        await asyncio.Event().wait()
                    case "until":
                        while not os.path.exists(operands[0]):  # noqa: ASYNC240 - a look at a local file
                            await asyncio.sleep(0.01)
                    case "block":
                        _block_until(operands[0])
                    case "die":
                        self._die_once(signal.Signals[operands[0]], context)
                    case "perish":
                        self._note("die", context)
                        os.kill(os.getpid(), signal.Signals[operands[0]])
                    case "raise":
                        raise _failure(*operands)
                    case "yield":
                        yield operands[0]
                    case "end":
                        yield {"token_ids": [], "index": 0, "finish_reason": operands[0]}
                        return
                    case "return":
                        return
            yield {"token_ids": [], "index": 0, "finish_reason": "stop"}
        finally:
            self._note("finally", context, sent=sent, last_at=last_at)

    async def abort(self, context: Any) -> None:
        self._note("abort", context)

    async def drain(self) -> None:
        self._note("drain", None)

    async def cleanup(self) -> None:
        self._note("cleanup", None)

    def _die_once(self, number: signal.Signals, context: Any) -> None:
        if self._is_first_here(context):
            self._note("die", context)
            os.kill(os.getpid(), number)

    def _is_first_here(self, context: Any) -> bool:
        folder = os.path.dirname(os.environ["SCRIPTED_JOURNAL"])
        try:
            os.close(os.open(os.path.join(folder, f"died-{context.metadata['tag']}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _chunk(self, request: GenerateRequest, token: int) -> dict[str, Any]:
        chunk: dict[str, Any] = {"token_ids": [token], "index": 0}
        wanted = (request.get("output_options") or {}).get("logprobs")
        if wanted is not None:
            top = [{"rank": 1 + n, "token_id": token + n, "logprob": -0.5 * (n + 1)} for n in range(max(wanted, 1))]
            chunk |= {"log_probs": [-0.5], "top_logprobs": [top]}
        return chunk

    def _note(self, event: str, context: Any, **more: Any) -> None:
        known = {"event": event, "at": time.monotonic(), "worker": NAME, "pid": os.getpid()}
        tag = "" if context is None else context.metadata.get("tag", "")
        line = known | {"id": context and context.id(), "tag": tag} | more
        os.write(self._journal, json.dumps(line).encode() + b"\n")


def _endless(text: bytes) -> Any:
    while True:
        yield from text


def _block_until(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)  # the block


def _failure(kind: str | int, message: str) -> BaseException:
    if isinstance(kind, int):
        return errors.HttpError(kind, message)
    found = getattr(errors, kind, None) or getattr(__import__("builtins"), kind)
    error: BaseException = found(message)
    return error


if __name__ == "__main__":
    run(ScriptedEngine)

"""The content of a request in flight and of its answer, for viewers with the permission. Nothing is kept for it: the ids are there anyway."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from dynamo.frontend.base.redaction import Redact
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.parts.inspector.stream_rows import key_name
from dynamo.frontend.pipeline.exchange import Exchange
from dynamo.frontend.pipeline.text_generation import TextPlan
from dynamo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CONTENT_SCHEMA: Final = "dynamo.inspect.content.v1"
MAX_CONTENT_BYTES: Final = 64 * 1024  # of the prompts, and again of the answers
MAX_TOKENS: Final = 16_384  # of the prompts, and again of the answers: about as many bytes, and 10 ms of the event loop
MAX_SHOWN: Final = 16  # prompts, and answers


class ContentReader:
    """Makes text of the token ids that a request holds while it runs. Used on the event loop only."""

    def __init__(self, models: ModelDirectory, redact: Redact | None) -> None:
        """`redact`: the operator's function; what it makes of a record is shown in its place, and nothing for None."""
        self._models, self._redact = models, redact

    def read(self, exchange: Exchange) -> dict[str, Any] | None:
        """Return the prompts from their beginning, and the ends of the answers; None: nothing is known, or may be shown."""
        work, name = exchange.work, exchange.model
        model = None if name is None else self._models.lookup(name)
        if work is None or model is None:
            return None
        plan = work.plan
        if isinstance(plan, TextPlan):  # its worker makes the text, and its answer passes through
            prompts = [_said(body) for body in plan.bodies[:MAX_SHOWN]]
            answers: list[str] | None = None
        else:
            tokenizer = model.text.tokenizer
            shown = plan.prompts[:MAX_SHOWN]
            prompts = [_text(tokenizer, ids[: MAX_TOKENS // len(shown)]) for ids in shown]
            running = work.running[:MAX_SHOWN]
            answers = [
                _text(tokenizer, stream.request.generated[-(MAX_TOKENS // len(running)) :]) for stream in running
            ]
        record: dict[str, Any] = {
            "schema": CONTENT_SCHEMA,
            "id": exchange.response_id,
            "key": key_name(exchange.identity),
            "model": name,
            "prompt_tokens": work.tally.prompt_tokens,
            "prompts": _bounded(prompts),
            "output_tokens": sum(stream.tokens for stream in work.running),
            "answers": None if answers is None else _bounded(answers, keeps_end=True),
        }
        return self._redacted(record)

    def _redacted(self, record: dict[str, Any]) -> dict[str, Any] | None:
        if self._redact is None:
            return record
        try:
            return self._redact(record)
        except Exception as error:
            # Whatever it meant to take out is still in there, and may be in the error's text, too.
            logger.error("content is not shown, because the redaction failed for it with %s", type(error).__name__)
            return None


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _said(body: dict[str, Any]) -> str:
    """Return the content of a body of a model that takes text: its prompt, or its messages as JSON."""
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else msgspec.json.encode(body.get("messages")).decode()


def _bounded(texts: Sequence[str], *, keeps_end: bool = False) -> list[str]:
    """Return texts that are together no longer than they may be, each with its beginning, or with its end."""
    limit = MAX_CONTENT_BYTES // max(1, len(texts))
    found = []
    for text in texts:
        raw = text[-limit:].encode(errors="replace") if keeps_end else text[:limit].encode(errors="replace")
        found.append((raw[-limit:] if keeps_end else raw[:limit]).decode(errors="ignore"))
    return found

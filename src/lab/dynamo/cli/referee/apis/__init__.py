"""The checks of each API, by its name in --api."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from dynamo.cli.referee import chat_checks
from dynamo.cli.referee.apis import (
    batches,
    chat_agents,
    embeddings,
    files,
    messages,
    messages_agents,
    messages_stream,
    responses,
    responses_agents,
    responses_stream,
)
from dynamo.cli.referee.apis.refusals import refusal_rows
from dynamo.cli.referee.checks import Check, checks_of_rows
from dynamo.cli.referee.text_checks import CHAT, COMPLETIONS, rows_of
from dynamo.cli.referee.text_checks import is_there as text_is_there

__all__ = ["API_CHECKS", "embeddings", "messages", "responses"]

API_CHECKS: Final[dict[str, Callable[[], list[Check]]]] = {
    "chat": lambda: checks_of_rows(
        "chat", [*rows_of(CHAT), *chat_checks.ROWS, *chat_agents.ROWS], partial(text_is_there, CHAT)
    ),
    "completions": lambda: checks_of_rows("completions", rows_of(COMPLETIONS), partial(text_is_there, COMPLETIONS)),
    "responses": lambda: checks_of_rows(
        "responses",
        [*responses.ROWS, *responses_stream.ROWS, *refusal_rows(responses.REFUSALS), *responses_agents.ROWS],
        responses.is_there,
    ),
    "messages": lambda: checks_of_rows(
        "messages",
        [*messages.ROWS, *messages_stream.ROWS, *refusal_rows(messages.REFUSALS), *messages_agents.ROWS],
        messages.is_there,
    ),
    "embeddings": lambda: checks_of_rows(
        "embeddings", [*embeddings.ROWS, *refusal_rows(embeddings.REFUSALS)], embeddings.is_there
    ),
    "files": lambda: checks_of_rows("files", [*files.ROWS, *batches.ROWS], files.is_there),
}

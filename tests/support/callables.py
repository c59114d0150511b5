"""Callables of every kind, as a user would write them; `journal` says what happened to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from dynamo.errors import InvalidArgument

journal: list[Any] = []


async def shout(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    for word in messages[-1]["content"].split():
        yield word.upper() + " "


async def echo(prompt: str, temperature: float = 0.5, max_tokens: int | None = None) -> AsyncIterator[str]:
    yield f"{prompt}|{temperature}|{max_tokens}"


async def letters(prompt: str) -> AsyncIterator[str]:
    try:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            yield letter
            await asyncio.sleep(0)
    finally:
        journal.append("letters closed")


async def endless(prompt: str) -> AsyncIterator[str]:
    try:
        yield "first"
        await asyncio.Event().wait()
    finally:
        journal.append("endless closed")


async def whole(prompt: str) -> str:
    return "all of it"


def in_thread(prompt: str) -> Iterator[str]:
    journal.append(threading.current_thread() is threading.main_thread())
    try:
        while True:
            yield "tick "
    finally:
        journal.append("in_thread closed")


def plain(prompt: str) -> str:
    return prompt[::-1]


async def counted(prompt: str) -> AsyncIterator[Any]:
    yield {"text": "two tokens"}
    yield {
        "finish_reason": "content_filter",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }


async def refuses(prompt: str) -> AsyncIterator[str]:
    if prompt == "late":
        yield "some"
    if prompt == "bug":
        raise KeyError("oops")
    raise InvalidArgument("this prompt is not for me")


async def wrong(prompt: str) -> AsyncIterator[Any]:
    yield 7


async def ids(token_ids: list[int]) -> AsyncIterator[int]:
    for token in token_ids[:5]:
        yield token


async def id_lists(tokens: list[int], seed: int) -> AsyncIterator[list[int]]:
    journal.append(seed)
    while True:
        yield [65, 66, 67]
        await asyncio.sleep(0)


def ids_in_thread(token_ids: list[int]) -> Iterator[int]:
    yield from b"abc"


async def takes_everything(messages: Any, context: Any, **options: Any) -> AsyncIterator[str]:
    yield f"{context.id()} {sorted(options)}"


not_a_function = 7

"""The worker's book of running requests: what it reports of blocks and of prompt tokens that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo.worker import running_requests
from dynamo.worker.running_requests import RunningRequests
from support.patience import PATIENCE_SECONDS


class Reports:
    """The last report of each rank."""

    def __init__(self) -> None:
        self.last: dict[int, tuple[int | None, int]] = {}

    def __call__(self, rank: int, blocks: int | None, prefill_tokens: int) -> None:
        self.last[rank] = (blocks, prefill_tokens)


def request(tokens: int, rank: Any = None) -> dict[str, Any]:
    body: dict[str, Any] = {"token_ids": [1] * tokens}
    return body if rank is None else body | {"routing": {"dp_rank": rank}}


async def test_a_request_counts_its_blocks_until_it_ends_and_its_prompt_until_the_first_token() -> None:
    reports = Reports()
    book = RunningRequests(reports, block_size=16)
    assert reports.last == {0: (0, 0)}
    first, second = book.begin(request(17)), book.begin(request(16))
    assert reports.last == {0: (3, 33)}
    book.first_token(first)
    book.first_token(first)
    assert reports.last == {0: (3, 16)}
    book.end(second)  # without a token
    assert reports.last == {0: (2, 0)}
    book.end(first)
    assert reports.last == {0: (0, 0)}
    book.close()


async def test_tokens_that_were_generated_are_counted_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_requests, "REFRESH_SECONDS", 0.01)
    reports = Reports()
    book = RunningRequests(reports, block_size=16, total_blocks=4)
    running = book.begin(request(16))
    for tokens, blocks in ((1, 2), (17, 3), (1000, 4)):  # never more than there are
        running.tokens = tokens
        async with asyncio.timeout(PATIENCE_SECONDS):
            while reports.last[0][0] != blocks:
                await asyncio.sleep(0.005)
    book.end(running)
    assert reports.last[0][0] == 0
    book.close()


async def test_a_request_counts_at_its_rank_or_at_the_emptiest() -> None:
    reports = Reports()
    book = RunningRequests(reports, block_size=16, ranks=range(2, 4))
    assert reports.last == {2: (0, 0), 3: (0, 0)}
    book.begin(request(32, rank=3))
    book.begin(request(16, rank=9))  # hosted elsewhere: the engine chooses
    book.begin(request(16))
    assert reports.last == {2: (2, 32), 3: (2, 32)}
    book.close()


async def test_prompts_that_another_worker_computes_do_not_wait_here() -> None:
    reports = Reports()
    book = RunningRequests(reports, block_size=16, prefills=False)
    running = book.begin(request(16))
    assert reports.last == {0: (1, 0)}
    book.first_token(running)
    book.end(running)
    assert reports.last == {0: (0, 0)}
    book.close()


async def test_an_engine_without_blocks_reports_prompt_tokens_only() -> None:
    reports = Reports()
    book = RunningRequests(reports, block_size=None)
    running = book.begin(request(16))
    assert reports.last == {0: (None, 16)}
    book.end(running)
    assert reports.last == {0: (None, 0)}

"""Two workers of SGLang behind a router that goes by KV events."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.ends import end_idle
from support.engine_cluster import SGLANG, served_engine
from support.leftovers import Belongings
from support.processes import wait

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not SGLANG.python, reason=SGLANG.why_not),
    pytest.mark.timeout(1200),
]
PAGE = 16  # tokens
EVENTS = "dynamo_component_kv_publisher_zmq_events_total"


def test_a_repeated_prompt_goes_to_the_worker_that_has_it(tmp_path: Path) -> None:
    with served_engine(SGLANG, tmp_path, "kv") as served:
        generator = random.Random(3)
        for _ in range(6):
            text = f"Sort {' '.join(str(generator.randrange(100)) for _ in range(60))}."
            first = served.ask(text, max_tokens=2).usage

            def hit(text: str = text, tokens: int = first.prompt_tokens) -> bool:
                again = served.ask(text, max_tokens=2).usage
                return bool(again.prompt_tokens_details.cached_tokens >= (tokens - 1) // PAGE * PAGE)

            wait(hit, lambda: "a repeated prompt that is in the cache")  # the events need a moment
        for worker in served.workers.values():
            assert worker.metric(EVENTS) > 0
        idle, killed = served.workers.values()
        end_idle(idle, served.temporary)
        belongings = Belongings(killed, served.temporary)
        killed.kill()  # its processes die in the same moment
        assert belongings.files
        belongings.wait_gone()

"""No part is called for a token."""

from __future__ import annotations

import sys
from pathlib import Path

from support.frontend_cluster import cluster, say


async def test_a_part_is_never_called_for_a_token(tmp_path: Path) -> None:
    async with cluster(tmp_path) as house:
        await house.worker(say(*"a long answer"))
        calls: list[str] = []

        def trace(frame: object, event: str, argument: object) -> None:
            file = frame.f_code.co_filename  # type: ignore[attr-defined]
            if event == "call" and "/frontend/parts/" in file:
                calls.append(frame.f_code.co_qualname)  # type: ignore[attr-defined]

        sys.setprofile(trace)
        try:
            short = await house.client.chat(stream=True, max_tokens=1)
            few = len(calls)
            calls.clear()
            await house.client.chat(stream=True)
        finally:
            sys.setprofile(None)
        assert short.status == 200
        assert abs(len(calls) - few) <= 2  # the pictures of the inspector may be taken meanwhile

"""Each token of SmolLM2's answers has a log probability, also where several make up one character, in both modes of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from support.http_client import CHAT, Reply
from support.real_models import Server, served_llama

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

MODES: Final = ("text", "tokens")
JAPAN: Final = "日本"  # six bytes, of which SmolLM2 makes more tokens than characters
QUESTION: Final = "Write something about the sea, the caf\u00e9 and 日本."
NEARLY: Final = 0.05  # of a log probability that was computed in another batch


@pytest.fixture(scope="module")
def served(smollm2: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Both modes; with a folder of temporary files in which no path is short enough for a socket."""
    root = tmp_path_factory.mktemp("log-probabilities")
    python, file = smollm2
    long = root / ("a-long-name" * 12)
    long.mkdir()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(long))
        text = stack.enter_context(served_llama(root / "text", python, str(file), 1, engine="llamacpp-text"))
        tokens = stack.enter_context(served_llama(root / "tokens", python, "smollm2", 2))
        yield {"text": text, "tokens": tokens}


def entries_of(reply: Reply) -> list[dict[str, Any]]:
    """The entries of an answer, streamed or not."""
    assert reply.status == 200, reply.body
    is_stream = reply.headers["content-type"].startswith("text/event-stream")
    parts = reply.events if is_stream else [reply.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    return [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]


async def asked(server: Server, **more: Any) -> Reply:
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    return await server.reply(CHAT, body | more)


@pytest.mark.parametrize("mode", MODES)
async def test_each_token_has_an_entry_and_their_bytes_are_the_text(served: dict[str, Server], mode: str) -> None:
    whole = await asked(served[mode])
    entries = entries_of(whole)
    assert JAPAN in whole.text
    assert len(entries) == whole.json()["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == whole.text
    within = [entry for entry in entries if "\ufffd" in entry["token"]]
    assert len(within) > len(JAPAN)
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        # The most probable token was taken.
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"], abs=NEARLY)
    streamed = entries_of(await asked(served[mode], stream=True))
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in entries]

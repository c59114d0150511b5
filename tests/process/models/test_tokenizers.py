"""The tokenizer that we make of a GGUF file divides texts as llama.cpp does, by each rule that we know.

SmolLM2's file has one rule; copies of it with the name of another have the same vocabulary and merges. Where a model's own
tokenizer composes characters first, so does ours; llama.cpp does not, so it gets composed texts.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any, Final

import pytest

from dynamo.llamacpp.gguf_tokenizer import COMPOSED, WORDS, tokenizer_of
from dynamo.text.tokenizer import load_tokenizer
from support.http_client import CHAT
from support.real_models import PROMPTS, bare_llama
from support.real_prompts import greedy_requests

pytestmark = [pytest.mark.models, pytest.mark.timeout(600)]

OWN: Final = "smollm"
NASTY: Final = (
    "It's 1234567 o'clock, we'LL see: don't!!\n\n\n  \n x\t\ty  ", "a \u00a0 b\r\n\r\nc", "<|im_start|>user\nhi<|im_end|>", "1.234,56€ ½ ²³",
    "x" * 300, " " * 50, "\n" * 20, "été naïve straße ŒUVRE", "日本語とEnglishの混在です。123", "👩‍👩‍👧🎉", "def f(x):\n    return x**2  # ok\n", "'s't're've'm'll'd 'S'T",
)  # fmt: skip


def texts() -> list[str]:
    """What the requests of the other tests say, and what divides badly."""
    found: list[str] = [*NASTY]
    for path, body in greedy_requests(PROMPTS):
        said: list[Any] = [one["content"] for one in body["messages"]] if path == CHAT else [body["prompt"]]
        found += [text for text in said if isinstance(text, str)]
    return found


@pytest.mark.parametrize("rule", WORDS)
def test_ids_are_those_of_llama_cpp(
    smollm2: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python, file = smollm2
    if rule != OWN:
        argv = ["-m", "gguf.scripts.gguf_new_metadata", "--pre-tokenizer", rule, str(file), str(tmp_path / "m.gguf")]
        subprocess.run([sys.executable, *argv], check=True, capture_output=True)
        file = tmp_path / "m.gguf"
    directory = tokenizer_of(file)
    assert directory is not None
    ours = load_tokenizer(directory).encode_inputs(texts(), add_special_tokens=True)
    with bare_llama(python, file, 1) as bare:

        async def theirs() -> list[list[int]]:
            body = {"add_special": True, "parse_special": True}
            shown = [unicodedata.normalize("NFC", text) if rule in COMPOSED else text for text in texts()]
            return [(await bare.reply("/tokenize", {**body, "content": text})).json()["tokens"] for text in shown]

        expected = asyncio.run(theirs())
    differing = [each for each in zip(texts(), ours, expected, strict=True) if each[1] != each[2]]
    assert not differing, f"{len(differing)} of {len(expected)}: {differing[:3]}"
    print(f"{rule}: {len(expected)} texts, {sum(map(len, expected))} tokens")

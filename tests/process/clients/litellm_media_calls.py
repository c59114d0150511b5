"""LiteLLM over embeddings, rankings, pictures and sound. Run by `test_clients.py` with the address of a server."""

from __future__ import annotations

import base64
import io
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look for prices on the internet first

import litellm

URL = sys.argv[1]
OPTIONS: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none"}
TEXT = "Hello, wörld! It is 5 o'clock."


def near(first: list[float], second: list[float]) -> bool:
    """Return whether two vectors are the same but for the order in which they were summed up."""
    return max(abs(one - other) for one, other in zip(first, second, strict=True)) < 1e-5


def vectors() -> None:
    """Embeddings, and a ranking in the shape of Jina and Cohere, from which it reads vLLM's."""
    found = litellm.embedding(model="openai/vector", input=["a fox", "a dog", "a fox"], **OPTIONS)
    first, second, third = (entry["embedding"] for entry in found.data)
    assert near(first, third)
    assert not near(first, second)
    assert found.usage.prompt_tokens > 0, found
    ranked = litellm.rerank(
        model="hosted_vllm/vector", query="a fox", documents=["a dog", "a fox"], top_n=1, api_base=URL, api_key="none"
    )
    (best,) = ranked.results
    assert best["index"] == 1, ranked
    assert abs(best["relevance_score"] - 1) < 1e-5, ranked


def content_of(image: Any) -> bytes:
    """Return the picture of an answer. It knows no `response_format` of models that it has not heard of."""
    head, _, data = image.url.partition(",")
    assert head == "data:image/png;base64", image
    return base64.b64decode(data)


def pictures() -> None:
    """Pictures of a prompt, and an edit."""
    made = litellm.image_generation(prompt="a fox", model="openai/pictures", n=2, size="1024x1024", **OPTIONS)
    assert len({content_of(image) for image in made.data}) == 2, made
    small = litellm.image_generation(prompt="a fox", model="openai/pictures", **OPTIONS)
    image = io.BytesIO(content_of(small.data[0]))
    image.name = "a.png"
    edited = litellm.image_edit(image=image, prompt="a dog", model="openai/pictures", **OPTIONS)
    assert content_of(edited.data[0]) != image.getvalue()


def sound() -> None:
    """What is spoken is heard again."""
    spoken = litellm.speech(model="openai/speech", voice="nova", input=TEXT, response_format="wav", **OPTIONS)
    file = io.BytesIO(spoken.content)
    file.name = "a.wav"
    heard = litellm.transcription(model="openai/ears", file=file, **OPTIONS)
    assert heard.text == TEXT, heard


vectors()
pictures()
sound()
print("litellm works")

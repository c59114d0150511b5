"""langchain over embeddings. Run by `test_clients.py` with the address of a server."""

from __future__ import annotations

import sys

from langchain_openai import OpenAIEmbeddings

made = OpenAIEmbeddings(model="vector", base_url=f"{sys.argv[1]}/v1", api_key="none", check_embedding_ctx_length=False)


def near(first: list[float], second: list[float]) -> bool:
    """Return whether two vectors are the same but for the order in which they were summed up."""
    return max(abs(one - other) for one, other in zip(first, second, strict=True)) < 1e-5


first, second, third = made.embed_documents(["a fox", "a dog", "a fox"])
assert near(first, third)
assert not near(first, second)
assert near(first, made.embed_query("a fox"))
print("langchain works")

"""The bodies of the answers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dynamo.protocol.openai.escaping import json_text
from dynamo.protocol.vectors.results import InputVector

__all__ = ["embeddings_body", "usage_member"]


def embeddings_body(vectors: Iterable[InputVector], *, model: str, prompt_tokens: int, base64: bool) -> bytes:
    """Return the body of `/v1/embeddings`."""
    encode = msgspec.json.encode
    entries = [
        b'{"object":"embedding","index":%d,"embedding":%b}'
        % (index, b'"%b"' % vector.base64() if base64 else encode(vector.floats().tolist()))
        for index, vector in enumerate(vectors)
    ]
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
        b",".join(entries),
        json_text(model),
        usage_member(prompt_tokens),
    )


def usage_member(prompt_tokens: int) -> bytes:
    """Return the usage of a request that generates nothing."""
    return b'{"prompt_tokens":%d,"total_tokens":%d}' % (prompt_tokens, prompt_tokens)

"""OpenAI's Embeddings API of the faulty server."""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import Any

from support.faulty_apis.reply import Reply, as_json, openai_refusal, parsed

WIDTH = 8


def vector_of(given: Any) -> list[float]:
    """Make the vector of an input: any, but always the same one, and close to that of no other."""
    digest = hashlib.sha256(repr(given).encode()).digest()
    return [byte - 127.5 for byte in digest[:WIDTH]]


class FaultyEmbeddings:
    """The API. `fault` names what it does wrongly."""

    def __init__(self, fault: str, model: str) -> None:
        self.fault, self.model = fault, model

    def reply(self, method: str, path: str, body: bytes) -> Reply | None:
        if path != "/v1/embeddings":
            return None
        if method != "POST" or self.fault == "route missing":
            return openai_refusal(404 if method == "POST" else 405, "no such route")
        asked = parsed(body)
        return self._refusal(asked) or self._answer(asked)

    def _refusal(self, asked: Any) -> Reply | None:
        if asked is None:
            return openai_refusal(500 if self.fault == "500 for malformed JSON" else 400, "not JSON")
        if "input" not in asked:
            status = 422 if self.fault == "422 for a missing input" else 400
            return openai_refusal(status, "missing", "input", as_text=self.fault == "error as text")
        if asked["model"] != self.model and self.fault != "200 for an unknown model":
            return openai_refusal(404, "no such model", "model")
        if not isinstance(asked.get("dimensions", 1), int) and self.fault != "wrong type taken":
            return openai_refusal(400, "not a number", "dimensions")
        if asked["input"] == [] and self.fault != "empty input taken":
            return openai_refusal(400, "empty", "input")
        if asked.get("encoding_format", "float") not in ("float", "base64") and self.fault != "any encoding taken":
            return openai_refusal(400, "not an encoding", "encoding_format")
        if len(str(asked["input"])) > 10_000:
            return openai_refusal(500 if self.fault == "500 for a long input" else 400, "more than 10000", "input")
        return None

    def _answer(self, asked: dict[str, Any]) -> Reply:
        given = asked["input"]
        is_tokens = isinstance(given, list) and bool(given) and isinstance(given[0], int)
        inputs = [given] if isinstance(given, str) or is_tokens else given
        if is_tokens and self.fault == "each token alone":
            inputs = given
        vectors = [vector_of(each) for each in inputs]
        if self.fault == "batch in another order" and len(inputs) == 3:
            vectors = vectors[::-1]
        if self.fault == "list of one differs" and inputs == given and len(given) == 1:
            vectors = [vector[::-1] for vector in vectors]
        if self.fault == "token lists joined" and inputs == given and given and isinstance(given[0], list):
            vectors = [vector_of([token for tokens in given for token in tokens]) for _ in given]
        width = asked.get("dimensions", WIDTH)
        width = width if isinstance(width, int) else WIDTH
        if width != WIDTH and self.fault == "dimensions ignored":
            width = WIDTH
        vectors = [vector[:width] for vector in vectors]
        if "dimensions" in asked and width == WIDTH and self.fault == "own dimensions change it":
            vectors = [vector[::-1] for vector in vectors]
        shift = self.fault == "index from 1"
        data = [
            {"object": "embedding", "index": n + shift, "embedding": self._written(vector, asked)}
            for n, vector in enumerate(vectors)
        ]
        used = sum(len(str(each).split()) for each in inputs)
        if self.fault == "usage of a list differs" and len(inputs) == 3:
            used += 1
        usage = {"prompt_tokens": used, "total_tokens": used + (self.fault == "total differs")}
        answer = {"object": "list", "data": data, "model": self.model, "usage": usage}
        if self.fault == "object missing":
            del answer["object"]
        kind = "text/plain" if self.fault == "answer not as JSON" else "application/json"
        return as_json(200, answer, **{"Content-Type": kind})

    def _written(self, vector: list[float], asked: dict[str, Any]) -> Any:
        if asked.get("encoding_format") != "base64":
            return [str(x) for x in vector] if self.fault == "numbers as text" else vector
        order = ">" if self.fault == "bytes in the other order" else "<"
        return base64.b64encode(struct.pack(f"{order}{len(vector)}f", *vector)).decode()

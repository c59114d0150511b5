"""Checks of OpenAI's Embeddings API."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from typing import Final

from dynamo.cli.referee.apis.refusals import Refusals, openai_error
from dynamo.cli.referee.checks import CannotJudge, Cause, Level, Probe, Row, demand, demand_route, served
from dynamo.cli.referee.exchange import Json, ServerAnswer, member
from dynamo.cli.referee.text_checks import LONG_WORDS

PATH: Final = "/v1/embeddings"
PAGE: Final = "OpenAI reference, Embeddings"
TEXTS: Final = ("the sea", "a caf\u00e9 in the morning, with bread", "\u65e5\u672c")
TOKENS: Final = ([5, 6, 7], [8, 9])  # ids that every vocabulary has
CLOSE: Final = 0.999  # cosine: a batch may be computed in another order of sums, or in half precision
SAME: Final = 1e-3  # between the numbers of two forms of a vector of length about 1


def body(model: str, given: Json = TEXTS[0], **more: Json) -> dict[str, Json]:
    """Build a request."""
    return {"model": model, "input": given, **more}


REFUSALS: Final = Refusals(
    PATH,
    body,
    "dimensions",
    "input",
    PAGE,
    "OpenAI reference, Error codes",
    openai_error,
    (404, 400),
    model=lambda probe: probe.embedding_model,
)


async def post(probe: Probe, given: Json = TEXTS[0], **more: Json) -> ServerAnswer:
    """Send a request."""
    return await probe.post(PATH, body(probe.embedding_model, given, encoding_format="float") | more)


async def is_there(probe: Probe) -> None:
    demand_route(probe, await post(probe), also=(400, 422))


def vectors(answer: Json) -> list[list[float]]:
    """Return the vectors in the order of their places. Raises CannotJudge where they cannot be read."""
    found = [member(each, "embedding") for each in member(answer, "data") or []]
    for vector in found:
        if not isinstance(vector, list) or not vector or not all(isinstance(x, int | float) for x in vector):
            raise CannotJudge("an embedding is not a list of numbers", Cause.SERVER)
    return found


async def embedded(probe: Probe, given: Json = TEXTS[0], *, is_optional: bool = False) -> list[list[float]]:
    """Request embeddings as numbers."""
    return vectors(served(await post(probe, given), is_optional=is_optional).json())


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors, 0 where one is none."""
    product = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / product if product else 0.0


def demand_close(one: Sequence[float], other: Sequence[float], what: str) -> None:
    """Raise Broken unless two vectors are those of one text."""
    demand(len(one) == len(other), f"{what}: the vectors have {len(one)} and {len(other)} numbers")
    found = cosine(one, other)
    demand(found >= CLOSE, f"{what}: the cosine of the two vectors is {found:.4f}, below {CLOSE}")


async def check_shape(probe: Probe) -> None:
    answer = served(await post(probe)).json()
    demand(member(answer, "object") == "list", f"object is {member(answer, 'object')!r}, not 'list'")
    demand(isinstance(member(answer, "model"), str), "model is not a text")
    data = member(answer, "data")
    demand(isinstance(data, list) and len(data) == 1, "data is not a list with one embedding")
    kind = member(data, 0, "object")
    demand(kind == "embedding", f"the object of an embedding is {kind!r}")


async def check_numbers(probe: Probe) -> None:
    for vector in [member(each, "embedding") for each in member(served(await post(probe)).json(), "data") or []]:
        demand(isinstance(vector, list) and vector, "an embedding is not a list of numbers")
        demand(all(isinstance(x, int | float) and math.isfinite(x) for x in vector), "not all numbers are finite")
        demand(any(vector), "an embedding is 0 everywhere")


async def check_json_type(probe: Probe) -> None:
    kind = served(await post(probe)).headers.get("content-type", "")
    demand(kind.startswith("application/json"), f"Content-Type is {kind!r}")


async def check_order(probe: Probe) -> None:
    answer = served(await post(probe, list(TEXTS))).json()
    found = [member(each, "index") for each in member(answer, "data") or []]
    demand(found == [0, 1, 2], f"the indices of three embeddings are {found}")


async def check_batch(probe: Probe) -> None:
    batch = await embedded(probe, list(TEXTS))
    demand(len(batch) == len(TEXTS), f"{len(batch)} embeddings for {len(TEXTS)} texts")
    for text, vector in zip(TEXTS, batch, strict=True):
        alone = await embedded(probe, text)
        demand_close(vector, alone[0], f"{text!r} in a list and alone")


async def check_single(probe: Probe) -> None:
    listed, alone = await embedded(probe, [TEXTS[1]]), await embedded(probe, TEXTS[1])
    demand(len(listed) == 1, f"{len(listed)} embeddings for a list of one text")
    demand_close(listed[0], alone[0], "a text and a list of it")


async def check_tokens(probe: Probe) -> None:
    found = await embedded(probe, TOKENS[0], is_optional=True)
    demand(len(found) == 1, f"{len(found)} embeddings for one list of token ids")


async def check_token_lists(probe: Probe) -> None:
    found = await embedded(probe, list(TOKENS), is_optional=True)
    demand(len(found) == len(TOKENS), f"{len(found)} embeddings for {len(TOKENS)} lists of token ids")
    alone = await embedded(probe, TOKENS[0], is_optional=True)
    if len(alone) == 1:  # else input.tokens finds it
        demand_close(found[0], alone[0], "token ids in a list of lists and alone")


async def check_base64(probe: Probe) -> None:
    answer = served(await post(probe, TEXTS[1], encoding_format="base64"), is_optional=True).json()
    packed = member(answer, "data", 0, "embedding")
    demand(isinstance(packed, str), "encoding_format is base64, and the embedding is not a text")
    try:
        data = base64.b64decode(packed, validate=True)
    except binascii.Error as error:
        demand(False, f"the embedding is not base64: {error}")
        return
    plain = (await embedded(probe, TEXTS[1]))[0]
    demand(len(data) == 4 * len(plain), f"{len(data)} bytes for {len(plain)} numbers of 4 bytes")
    found = struct.unpack(f"<{len(plain)}f", data)
    apart = max(abs(a - b) for a, b in zip(found, plain, strict=True))
    scale = max(1.0, *(abs(x) for x in plain))
    demand(apart <= SAME * scale, f"a number of base64 is {apart:g} from that of float (little-endian float32)")


async def check_dimensions(probe: Probe) -> None:
    whole = len((await embedded(probe))[0])
    wanted = max(1, whole // 2)
    answer = served(await post(probe, dimensions=wanted), is_optional=True).json()
    found = len(vectors(answer)[0])
    demand(found == wanted, f"dimensions is {wanted}, and the vector has {found} numbers")


async def check_dimensions_whole(probe: Probe) -> None:
    """Give the dimensions that the model has: whatever it was trained for, it has these."""
    plain = (await embedded(probe))[0]
    answer = served(await post(probe, dimensions=len(plain)), is_optional=True).json()
    demand_close(vectors(answer)[0], plain, "with the model's own dimensions and without")


def _used(answer: Json) -> int:
    prompt, total = (member(answer, "usage", f"{name}_tokens") for name in ("prompt", "total"))
    demand(isinstance(prompt, int) and prompt > 0, f"usage.prompt_tokens is {prompt!r}")
    demand(prompt == total, f"prompt_tokens is {prompt}, and total_tokens {total}")
    return int(prompt)


async def check_usage(probe: Probe) -> None:
    _used(served(await post(probe)).json())


async def check_usage_sum(probe: Probe) -> None:
    batch = member(served(await post(probe, list(TEXTS))).json(), "usage", "prompt_tokens")
    alone = [member(served(await post(probe, text)).json(), "usage", "prompt_tokens") for text in TEXTS]
    if not all(isinstance(n, int) for n in alone):
        raise CannotJudge("an answer has no usage", Cause.SERVER)
    demand(batch == sum(alone), f"prompt_tokens is {batch} for three texts, and {alone} for each")


async def check_empty(probe: Probe) -> None:
    answer = await post(probe, [])
    demand(answer.status == 400, f"expected status 400, got {answer.message}")


async def check_encoding(probe: Probe) -> None:
    answer = await post(probe, encoding_format="referee")
    demand(answer.status == 400, f"expected status 400, got {answer.message}")


async def check_too_long(probe: Probe) -> None:
    answer = await post(probe, "sea " * LONG_WORDS)
    if answer.status in (200, 413):
        raise CannotJudge(f"status {answer.status}: the input fits or is cut, or another limit comes first", Cause.NOT_OFFERED)  # fmt: skip
    demand(answer.status == 400, f"expected status 400, got {answer.status}")


_CORE, _AGENT = Level.CORE, Level.AGENT
ROWS: Final[tuple[Row, ...]] = (
    ("answer.shape", check_shape, _CORE, "major", f"{PAGE}: A list with object, model and data, whose entries have the object embedding", "Write every required member with its type"),
    ("answer.numbers", check_numbers, _CORE, "major", f"{PAGE}, The embedding object: an embedding is a list of numbers", "Check vectors before they are sent"),
    ("answer.content-type", check_json_type, _CORE, "minor", "RFC 8259 section 11: JSON is application/json", "Send Content-Type: application/json"),
    ("order", check_order, _CORE, "major", f"{PAGE}, The embedding object: index is the place of the input", "Send the embeddings in the order of the inputs"),
    ("batch-equals-single", check_batch, _CORE, "major", f"{PAGE}: A list of texts has the embeddings of each text", "Keep the inputs of a batch apart, and padding out of the vector"),
    ("input.list-of-one", check_single, _CORE, "major", f"{PAGE}: input is a text or a list of texts", "Treat a text as a list of one"),
    ("input.tokens", check_tokens, _AGENT, "major", f"{PAGE}: input may be a list of token ids", "Take token ids as they are"),
    ("input.token-lists", check_token_lists, _AGENT, "major", f"{PAGE}: input may be a list of lists of token ids", "Treat each list as one input"),
    ("base64", check_base64, _CORE, "major", f"{PAGE}: encoding_format base64 has the same numbers as float", "Pack little-endian float32"),
    ("dimensions", check_dimensions, _AGENT, "minor", f"{PAGE}: dimensions is the length of the vector", "Shorten the vector, or refuse dimensions with 400"),
    ("dimensions.whole", check_dimensions_whole, _AGENT, "minor", f"{PAGE}: dimensions as many as the model has change nothing", "Accept the model's own dimensions"),
    ("usage", check_usage, _CORE, "major", f"{PAGE}: prompt_tokens are counted, and total_tokens are as many", "Count the tokens of the inputs"),
    ("usage.sum", check_usage_sum, _CORE, "major", f"{PAGE}: usage of a list counts each of its texts", "Add the tokens of all inputs"),
    ("error.empty-input", check_empty, _CORE, "major", f"{PAGE}: input is not empty", "Refuse it with 400"),
    ("error.encoding-format", check_encoding, _AGENT, "minor", f"{PAGE}: encoding_format is float or base64", "Refuse others with 400"),
    ("limit.input", check_too_long, _AGENT, "major", f"{PAGE}: An input that is longer than the model takes is refused", "Refuse it with 400"),
)  # fmt: skip

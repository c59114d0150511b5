"""The required form of the items of a stream; each check takes the items one by one, so that it ends with the first bad one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, Protocol

from dynamo.contract.conformance.failures import ConformanceFailure
from dynamo.protocol.finish import CANCELLED, STOP, EngineFailed, normalise

MAX_ITEMS: Final = 100_000  # of one stream
MAX_TOKEN_ID: Final = 2**32 - 1


class StreamCheck(Protocol):
    """Judges one stream."""

    def take(self, item: Any) -> None:
        """Judge the next item. Raises ConformanceFailure."""

    def finish(self) -> None:
        """Judge the stream as a whole, after its last item. Raises ConformanceFailure."""


class TokenCheck:
    """An answer in tokens to a request for one choice."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._chunks = self._tokens = 0
        self._last: Mapping[str, Any] = {}
        self._reason: str | None = None

    def take(self, item: Any) -> None:
        """Judge one chunk."""
        if self._reason is not None:
            raise ConformanceFailure("ChunkAfterTerminal", f"chunk {self._chunks - 1} was terminal")
        where = f"chunk {self._chunks}"
        if not isinstance(item, Mapping) or not isinstance(item.get("token_ids"), list | tuple):
            raise ConformanceFailure("StreamYieldedError", f"{where} is not a chunk with token_ids: {item!r:.200}")
        if "index" not in item:
            raise ConformanceFailure("StreamYieldedError", f"{where} has no index")
        if type(item["index"]) is not int or item["index"] != 0:
            raise ConformanceFailure("IndexInvalid", f"{where} has index {item['index']!r}")
        _check_token_ids(item["token_ids"], where)
        self._chunks += 1
        self._tokens += len(item["token_ids"])
        if self._tokens > self._max_tokens:
            raise ConformanceFailure("MaxTokensIgnored", max_tokens=self._max_tokens, yielded=self._tokens)
        self._last, self._reason = item, _reason(item)
        if self._chunks > MAX_ITEMS:
            raise ConformanceFailure("StreamYieldedError", f"more than {MAX_ITEMS} chunks without a finish_reason")

    def finish(self) -> None:
        """Judge the whole answer."""
        if not self._chunks:
            raise ConformanceFailure("NoChunksYielded")
        if self._reason is None:
            raise ConformanceFailure("NoTerminalChunk")
        usage = self._last.get("completion_usage") or {}
        if not isinstance(usage, Mapping):
            raise ConformanceFailure("StreamYieldedError", f"completion_usage is {type(usage).__name__}, not a dict")
        reported = usage.get("completion_tokens")
        if reported is not None and reported != self._tokens:
            raise ConformanceFailure("CompletionTokensMismatch", chunked=self._tokens, reported=reported)


class EncodeCheck:
    """The one chunk that answers an encode request."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []

    def take(self, item: Any) -> None:
        """Judge one chunk."""
        if not isinstance(item, Mapping):
            raise ConformanceFailure("StreamYieldedError", f"the chunk is {type(item).__name__}")
        _reason(item)
        self._chunks.append(item)
        if len(self._chunks) > MAX_ITEMS:
            raise ConformanceFailure("EncodeChunkCount", count=len(self._chunks))

    def finish(self) -> None:
        """Judge the answer."""
        if not self._chunks:
            raise ConformanceFailure("NoChunksYielded")
        if len(self._chunks) != 1:
            raise ConformanceFailure("EncodeChunkCount", count=len(self._chunks))
        (chunk,) = self._chunks
        if _reason(chunk) != STOP:
            raise ConformanceFailure("EncodeTerminalExpected", f"finish_reason is {chunk.get('finish_reason')!r}")
        if chunk.get("token_ids"):
            raise ConformanceFailure("EncodeTokensNotEmpty", count=len(chunk["token_ids"]))
        if not isinstance(chunk.get("encoder_result"), dict):
            raise ConformanceFailure("EncoderResultExpectedObject", f"got {type(chunk.get('encoder_result')).__name__}")
        usage = chunk.get("completion_usage")
        if usage is not None:
            counts = usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens")
            if counts[1] != 0 or counts[0] != counts[2]:
                raise ConformanceFailure("EncodeUsageMismatch", f"prompt, completion, total = {counts}")


class RawCheck:
    """An answer in objects."""

    def __init__(self) -> None:
        self._items = 0

    def take(self, item: Any) -> None:
        """Count one object."""
        self._items += 1
        if self._items > MAX_ITEMS:
            raise ConformanceFailure("StreamYieldedError", f"more than {MAX_ITEMS} objects")

    def finish(self) -> None:
        """Judge the answer."""
        if not self._items:
            raise ConformanceFailure("NoChunksYielded")


class CancelledCheck:
    """A request whose context was stopped before the first poll. `terminal`: its last chunk must report that."""

    def __init__(self, *, terminal: bool = True) -> None:
        self._terminal = terminal
        self._items = 0
        self._last: Any = None

    def take(self, item: Any) -> None:
        """Judge one item."""
        self._items += 1
        self._last = item
        if self._items > MAX_ITEMS:
            raise ConformanceFailure("StreamYieldedError", f"more than {MAX_ITEMS} chunks of a cancelled request")
        if isinstance(item, Mapping):
            _reason(item)

    def finish(self) -> None:
        """Judge the last item."""
        if not self._terminal:
            return
        if not self._items:
            raise ConformanceFailure("NoChunksYielded", "the cancelled request")
        if not isinstance(self._last, Mapping) or _reason(self._last) != CANCELLED:
            found = self._last.get("finish_reason") if isinstance(self._last, Mapping) else self._last
            raise ConformanceFailure("CancellationIgnored", f"the finish_reason of its last chunk is {found!r}")


def _check_token_ids(token_ids: Any, where: str) -> None:
    for position, value in enumerate(token_ids):
        try:
            token = -1 if isinstance(value, bool) else operator.index(value)  # also numpy's and torch's integers
        except TypeError:
            token = -1
        if not 0 <= token <= MAX_TOKEN_ID:
            raise ConformanceFailure("TokenIdsInvalid", f"token_ids[{position}] of {where} is {value!r}")


def _reason(chunk: Mapping[str, Any]) -> str | None:
    """Return the canonical finish reason. An error reason is a stream error; so is one of an impossible type."""
    reason = chunk.get("finish_reason")
    if reason is None:
        return None
    try:
        word = normalise(reason)
    except (EngineFailed, TypeError) as error:
        raise ConformanceFailure("StreamYieldedError", f"{type(error).__name__}: {error}") from error
    if word == STOP and reason.strip().lower() not in (STOP, "tool_calls"):  # a server takes any other word for "stop"
        raise ConformanceFailure("UnknownFinishReason", f"got {reason!r}")
    return word

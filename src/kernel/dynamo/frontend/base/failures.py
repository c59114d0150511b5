"""The requests that failed: counted by kind, and the last ones kept as bundles.

For the inspector, which shows them, and for `dynamo replay`, which sends them again:

    ring.recent()    the failures that have a bundle, the newest first          -> list[FailedRequest]
    ring.grouped()   what failed, by kind: (status, code, model, worker, message) -> list[FailureGroup]
    ring.bundle(id)  everything that is known of one of them, as JSON values    -> dict | None

Failures of one kind have the same message but for ids, numbers and quoted texts (`message_template`). A storm of one kind,
or of one status and code, pushes out its own bundles first, so the only example of a rare one stays. What was turned away at the door
(overload, limits of keys) is counted and has no bundle: nothing was parsed, and there is nothing to reproduce.

On the event loop only. Everything is bounded: the bundles by number and bytes, the kinds by number.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from dynamo.protocol.request_ids import uuid_in
from dynamo.runtime.observe.log_text import one_line

BUNDLE_SCHEMA: Final = "dynamo.failure.v1"
MAX_GROUPS: Final = 256
MAX_BUNDLE_BYTES: Final = 512 * 1024
BUNDLES_PER_SECOND: Final = (
    20  # made at most; a bundle takes 0.1 to 1 ms. Twice as many where they are the first of their kind
)
_RATE_MINUTES: Final = 5
_RATE_SLOTS: Final = 10 * _RATE_MINUTES

FailureKey = tuple[int, str, str, str, str]
"""(status, code, model, worker, template)"""


class FailedRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that failed, in a line."""

    id: str
    """The `id` of its answer, `chatcmpl-…`; its bundle is `ring.bundle(id)`."""
    request_id: str
    """What the client has of it: its own `x-request-id`, or else the `id` of its answer."""
    at_ms: int
    """When it failed: Unix milliseconds."""
    status: int
    error_type: str
    """As metrics name it: validation, not_found, unavailable, internal, ..."""
    code: str = ""
    endpoint: str = ""
    model: str = ""
    """Empty: its model was not found out."""
    worker: str = ""
    """The worker that failed, in lower-case hex; empty: no worker had it."""
    key_id: str = ""
    message: str = ""
    """What went wrong, for an operator: a client may have read less. Without what the request itself contained, where content is
    not kept."""


class FailureGroup(Struct, kw_only=True):
    """Failures of one kind."""

    status: int
    code: str
    model: str
    worker: str
    template: str
    """Their message, with ids, numbers and quoted texts replaced."""
    error_type: str
    count: int = 0
    """Since the frontend started, or since the kind was last forgotten."""
    rate_per_minute: float = 0.0
    """Over the last five minutes."""
    first_ms: int = 0
    last_ms: int = 0
    example_id: str | None = None
    """The newest one that has a bundle; None: none of them has."""


class _Kind:
    """The failures of one kind: their group, when they were, and which of them have bundles."""

    __slots__ = ("_slots", "group", "kept")

    def __init__(self, group: FailureGroup) -> None:
        self.group = group
        self.kept: deque[str] = deque()  # ids, the oldest first
        self._slots: deque[list[int]] = deque(maxlen=_RATE_SLOTS)  # [number of the slot, failures in it]

    def count(self, at_ms: int) -> None:
        group = self.group
        group.count += 1
        group.first_ms, group.last_ms = group.first_ms or at_ms, at_ms
        slot = _slot(at_ms)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1][1] += 1
        else:
            self._slots.append([slot, 1])

    def shown(self, now_ms: int) -> FailureGroup:
        oldest = _slot(now_ms) - _RATE_SLOTS
        recent = sum(count for slot, count in self._slots if slot > oldest)
        # Of a kind that is younger than the window, the time since its first; a minute at least, as one is no rate.
        minutes = min(_RATE_MINUTES, max(1.0, (now_ms - self.group.first_ms) / 60_000))
        example = self.kept[-1] if self.kept else None
        return msgspec.structs.replace(self.group, rate_per_minute=round(recent / minutes, 3), example_id=example)


class _Pace:
    """Bounds how many bundles are made within a second."""

    def __init__(self) -> None:
        self._second, self._made = 0, 0

    def admits(self, second: int, *, is_first: bool) -> bool:
        """Return whether a bundle may be made now, and count it. `is_first`: of its kind."""
        if second != self._second:
            self._second, self._made = second, 0
        if self._made >= BUNDLES_PER_SECOND * (2 if is_first else 1):
            return False
        self._made += 1
        return True


class FailureRing:
    """Counts failures by kind, and keeps bundles of the last ones."""

    def __init__(
        self,
        max_bundles: int,
        max_bytes: int,
        *,
        process: Callable[[], Mapping[str, object]] = dict,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`process`: what is the same for all bundles of this process, such as its version; called when a bundle is read."""
        self._max_bundles, self._max_bytes = max_bundles, max_bytes
        self._process, self._wall_clock = process, wall_clock
        self._kept: OrderedDict[str, tuple[FailedRequest, FailureKey, bytes]] = OrderedDict()
        self._bytes = 0
        self._kinds: OrderedDict[FailureKey, _Kind] = OrderedDict()  # the one that failed last at the end
        self._pace = _Pace()
        self.total = 0
        """Failures since the start."""

    # -- for the inspector ---------------------------------------------------------------------------------------

    def recent(self, limit: int = 100) -> list[FailedRequest]:
        """Return failures that have a bundle, the newest first."""
        found = list[FailedRequest]()
        for failure, _, _ in reversed(self._kept.values()):
            if len(found) == limit:
                break
            found.append(failure)
        return found

    def grouped(self, limit: int = 100) -> list[FailureGroup]:
        """Return the kinds of failures, the one that failed last first."""
        now_ms = self.now_ms()
        kinds = list(reversed(self._kinds.values()))
        return [kind.shown(now_ms) for kind in kinds[:limit]]

    def bundle(self, id: str) -> dict[str, object] | None:
        """Return everything that is known of one failure, as JSON values; None: it has no bundle, or has one no longer.

        Its members are described in docs/recording.md; `schema` names their version.
        """
        kept = self._kept.get(id)
        if kept is None:
            known = uuid_in(id)
            kept = next((each for key, each in self._kept.items() if uuid_in(key) == known), None)
        if kept is None:
            return None
        found: dict[str, object] = msgspec.json.decode(kept[2])
        found["process"] = dict(self._process())
        return found

    @property
    def kept_bytes(self) -> int:
        """How much memory the bundles take."""
        return self._bytes

    # -- for the pipeline ---------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return Unix milliseconds."""
        return int(self._wall_clock() * 1000)

    def count(self, failure: FailedRequest) -> None:
        """Count a failure that gets no bundle."""
        self._count(failure)

    def add(self, failure: FailedRequest, make: Callable[[], Mapping[str, object] | None]) -> None:
        """Count a failure, and keep its bundle, which is what `make` returns; None: it is not to be kept.

        `make` is not called where a bundle would not be kept.
        """
        key, kind = self._count(failure)
        if not self._max_bundles or not self._pace.admits(int(self._wall_clock()), is_first=not kind.kept):
            return
        made = make()
        if made is None:
            return
        data = msgspec.json.encode({"schema": BUNDLE_SCHEMA, **made})
        if len(data) > min(MAX_BUNDLE_BYTES, self._max_bytes):
            return
        self._forget(failure.id)
        self._kept[failure.id] = (failure, key, data)
        self._bytes += len(data)
        kind.kept.append(failure.id)
        while len(self._kept) > self._max_bundles or self._bytes > self._max_bytes:
            self._forget(self._to_forget(failure.id))

    def _count(self, failure: FailedRequest) -> tuple[FailureKey, _Kind]:
        self.total += 1
        template = message_template(failure.message)
        key = (failure.status, failure.code, failure.model, failure.worker, template)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_GROUPS:
                self._forget_kind(like=failure)
            kind = self._kinds[key] = _Kind(FailureGroup(
                status=failure.status, code=failure.code, model=failure.model, worker=failure.worker, template=template,
                error_type=failure.error_type,
            ))  # fmt: skip
        else:
            self._kinds.move_to_end(key)
        kind.count(failure.at_ms)
        return key, kind

    def _forget_kind(self, *, like: FailedRequest) -> None:
        """Forget the kind that was quiet for longest; of those with the same status and code, if there are any: a client that
        makes up ever new messages pushes out its own."""
        ours = (like.status, like.code)
        key = next((key for key in self._kinds if key[:2] == ours), next(iter(self._kinds)))
        for id in list(self._kinds[key].kept):
            self._forget(id)
        del self._kinds[key]

    def _to_forget(self, newest: str) -> str:
        """Return the oldest bundle of what has the most: of the statuses and codes first, then of its kinds."""
        by_answer = Counter(key[:2] for _, key, _ in self._kept.values())
        by_kind = Counter(key for _, key, _ in self._kept.values())
        others = [(id, key) for id, (_, key, _) in self._kept.items() if id != newest]
        return max(others, key=lambda each: (by_answer[each[1][:2]], by_kind[each[1]]))[0]  # of equal ones the first

    def _forget(self, id: str) -> None:
        kept = self._kept.pop(id, None)
        if kept is None:
            return
        _, key, data = kept
        self._bytes -= len(data)
        kind = self._kinds.get(key)
        if kind is not None and id in kind.kept:
            kind.kept.remove(id)


def _slot(at_ms: int) -> int:
    return at_ms * _RATE_SLOTS // (_RATE_MINUTES * 60_000)


MAX_TEMPLATE_CHARACTERS: Final = 240
_MAX_READ: Final = 2000  # characters of a message that are examined; an engine may quote a whole prompt

# Quoted texts, also one whose end was cut off, and the words between spaces. An apostrophe inside a word opens nothing.
_PARTS: Final = re.compile(
    r"""(?P<quoted>"[^"]*(?:"|$)|`[^`]*(?:`|$)|(?<![\w.])'[^']*(?:'|$))|(?P<word>[\w.:@%+-]+)|(?P<rest>.)""", re.S
)
_HEX: Final = re.compile(r"[0-9a-fA-F-]{8,}")
_ENDS: Final = ".:-"


def message_template(message: str) -> str:
    """Return a message with its ids, numbers and quoted texts replaced, as one safe line of bounded length.

    Messages that differ only in those have the same template.
    """
    found = "".join([_generic(part) for part in _PARTS.finditer(message[:_MAX_READ])])
    line = one_line(" ".join(found.split()), _MAX_READ * 4)
    return line if len(line) <= MAX_TEMPLATE_CHARACTERS else line[: MAX_TEMPLATE_CHARACTERS - 1] + "…"


def _generic(part: re.Match[str]) -> str:
    if part.lastgroup == "quoted":
        return f"{part[0][0]}*{part[0][0]}"
    if part.lastgroup == "rest":
        return part[0]
    word = part[0].rstrip(_ENDS)
    tail = part[0][len(word) :]
    if _HEX.fullmatch(word) or any(character.isdigit() for character in word):
        return f"#{tail}"
    return part[0]

"""The columns of every view of the inspector, written once: its page and the terminal draw their tables from these.

A column states which members of an entry it shows, and in which form. What only one of the two shows has no place in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

__all__ = ["COLUMNS", "Cells", "Form", "Pixels", "ViewColumn", "columns_of_page"]


class Form(StrEnum):
    """How the members of a column are written. The page and the terminal each have a writer for each form."""

    NAME = "name"  # what identifies the entry
    TEXT = "text"
    NAMES = "names"  # a list of them
    STATE = "state"  # a word with a tone
    CLOCK = "clock"  # a time in ms as a time of day
    NUMBER = "number"  # as it is: a status, a process id
    COUNT = "count"
    SIZE = "size"  # a count that is often a power of two
    BYTES = "bytes"
    RATE = "rate"
    SHARE = "share"  # 0 to 1
    SECONDS = "seconds"
    AGE = "age"  # since a time in ms, in whole units
    SILENCE = "silence"  # the same, with fractions where there is room
    RATIO = "ratio"  # of two members: 3/16
    OWN_TEXT = "own text"  # several members, or drawn as more than text: each side has code for it
    OWN_FIGURE = "own figure"

    @property
    def is_number(self) -> bool:
        """Whether it is aligned to the right, and sorted from the greatest."""
        return self not in _WORDS


_WORDS: Final = frozenset({Form.NAME, Form.TEXT, Form.NAMES, Form.STATE, Form.CLOCK, Form.OWN_TEXT})


class Pixels(Struct, frozen=True):
    """A column on the page."""

    label: str
    width: int = 0  # 0: it shares the room that is left
    help: str = ""
    is_long: bool = False  # has a line of its own where rows are cards


class Cells(Struct, frozen=True):
    """A column on the terminal."""

    title: str
    width: int
    widest: int = 0  # it grows up to this where there is room; 0: it keeps its width
    rank: int = 0  # where there is no room, columns of the highest rank go first
    keeps_tail: bool = False


class ViewColumn(Struct, frozen=True):
    """One column of one view."""

    id: str
    form: Form
    members: tuple[str, ...]
    page: Pixels | None
    terminal: Cells | None


def _column(name: str, form: Form, page: Pixels | None, terminal: Cells | None, of: str = "") -> ViewColumn:
    """Make a column of the members `of`; without them, of the member that has its name."""
    return ViewColumn(name, form, tuple((of or name).split()), page, terminal)


COLUMNS: Final[Mapping[str, tuple[ViewColumn, ...]]] = MappingProxyType({
    "workers": (
        _column("id", Form.NAME, Pixels("Worker", 140), Cells("ID", 6, 16, keeps_tail=True)),
        _column("role", Form.TEXT, Pixels("Role", 62), Cells("ROLE", 7, rank=4)),
        _column("models", Form.NAMES, Pixels("Models", 140, is_long=True), Cells("MODEL", 6, 28, 1)),
        _column("state", Form.STATE, Pixels("State", 112), Cells("STATE", 11)),
        _column("load", Form.RATIO, Pixels("Run/limit", 120), Cells("RUN/LIM", 9), "running limit"),
        _column("queue", Form.COUNT, Pixels("Queue", 75, "requests in its queue, and the age of the oldest"), Cells("QUE", 3, rank=2), "queued"),
        _column("age", Form.AGE, Pixels("Age", 72), Cells("AGE", 4, rank=5), "since_ms"),
        _column("rate", Form.RATE, Pixels("Tok/s", 75), Cells("TOK/S", 6, rank=1), "output_tokens_per_second"),
        _column("kv", Form.OWN_FIGURE, Pixels("KV", 105, "KV blocks in use"), Cells("KV%", 7, 12, 3)),
        _column("hits", Form.SHARE, Pixels("Hits", 70, "prompt tokens found in its cache"), Cells("HIT%", 4, rank=6), "prefix_hit_share"),
        _column("silent", Form.SILENCE, Pixels("Silent", 65, "the longest silence of one of its streams"), Cells("SILENT", 6, rank=7), "silent_ms"),
        _column("wire", Form.TEXT, None, Cells("WIRE", 6, rank=11)),
        _column("address", Form.TEXT, None, Cells("ADDRESS", 15, 24, 12)),
        _column("adapters", Form.NAMES, None, Cells("ADAPTERS", 8, 20, 14)),
        _column("version", Form.TEXT, None, Cells("VERSION", 8, 12, 13)),
        _column("card", Form.TEXT, None, Cells("CARD", 8, rank=15)),
        _column("note", Form.OWN_TEXT, Pixels("Note", is_long=True), Cells("NOTE", 12, 60, 2)),
    ),
    "streams": (
        _column("id", Form.NAME, Pixels("Request", 140), Cells("REQUEST", 13, 45)),
        _column("key", Form.TEXT, Pixels("Key", 92), Cells("KEY", 6, 16, 6)),
        _column("model", Form.TEXT, Pixels("Model", is_long=True), Cells("MODEL", 6, 28, 4)),
        _column("endpoint", Form.TEXT, Pixels("Endpoint", 70), Cells("ENDPOINT", 10, 22, 11)),
        _column("phase", Form.STATE, Pixels("Phase", 140), Cells("PHASE", 10)),
        _column("age", Form.AGE, Pixels("Age", 66), Cells("AGE", 4), "started_ms"),
        _column("wait", Form.SECONDS, Pixels("Wait", 58, "time in queues"), Cells("WAIT", 5, rank=7), "queued_seconds"),
        _column("ttft", Form.SECONDS, Pixels("TTFT", 72, "time to the first token"), Cells("TTFT", 5, rank=5), "ttft_seconds"),
        _column("in", Form.RATIO, Pixels("In/cached", 100, "tokens of the prompt, and those found in a cache"), Cells("IN/CACHED", 15, rank=8), "prompt_tokens cached_tokens"),
        _column("out", Form.RATIO, Pixels("Out/max", 100, "tokens so far, and at most"), Cells("OUT/MAX", 11, rank=2), "output_tokens max_tokens"),
        _column("rate", Form.RATE, Pixels("Tok/s", 54), Cells("TOK/S", 6, rank=3), "tokens_per_second"),
        _column("last", Form.SILENCE, Pixels("Last", 58, "since the last token"), Cells("LAST", 6), "last_token_ms"),
        _column("worker", Form.OWN_TEXT, Pixels("Worker", 86), Cells("WORKER", 6, 16, 1, keeps_tail=True)),
        _column("attempt", Form.COUNT, Pixels("Try", 42, "which attempt runs"), None),
        _column("n", Form.COUNT, Pixels("n", 34, "choices"), Cells("N", 2, rank=13), "choices"),
        _column("priority", Form.COUNT, None, Cells("PRIO", 4, rank=12)),
        _column("client_request_id", Form.TEXT, None, Cells("CLIENT ID", 10, 36, 14)),
        _column("client", Form.BYTES, Pixels("Unsent", 60, "bytes that wait for the client to read them"), None, "client_bytes_waiting"),
        _column("remark", Form.OWN_TEXT, None, Cells("", 9, 26)),
    ),
    "models": (
        _column("name", Form.NAME, Pixels("Model"), Cells("MODEL", 14, 48)),
        _column("namespace", Form.TEXT, Pixels("Namespace", 110), Cells("NAMESPACE", 9, 16, 5)),
        _column("ready", Form.OWN_TEXT, Pixels("Ready", 250, is_long=True), Cells("STATE", 9)),
        _column("workers", Form.OWN_TEXT, Pixels("Workers", 130), Cells("WORKERS", 9, 30)),
        _column("flight", Form.RATIO, Pixels("In flight", 90), Cells("RUN/LIM", 9), "in_flight limit"),
        _column("waiting", Form.COUNT, Pixels("Waiting", 80), Cells("WAIT", 4, rank=1)),
        _column("context", Form.SIZE, Pixels("Context", 90), Cells("CONTEXT", 8, rank=3), "context_length"),
        _column("block", Form.COUNT, Pixels("Block", 65), Cells("BLOCK", 5, rank=6), "block_size"),
        _column("mode", Form.TEXT, Pixels("Router", 110), Cells("ROUTER", 6, 14, 4), "router_mode"),
        _column("types", Form.NAMES, Pixels("Types", 170), Cells("TYPES", 8, 30, 7)),
        _column("parent", Form.TEXT, None, Cells("BASE", 6, 20, 8)),
        _column("adapters", Form.NAMES, Pixels("Adapters", 120), Cells("ADAPTERS", 8, 24, 9)),
        _column("aliases", Form.NAMES, None, Cells("ALIASES", 8, 24, 10)),
        _column("why_not", Form.TEXT, None, Cells("WHY NOT", 14, 60, 2)),
    ),
    "frontends": (  # the page has them as panels
        _column("id", Form.NAME, None, Cells("ID", 10, 20)),
        _column("host", Form.TEXT, None, Cells("HOST", 10, 24)),
        _column("pid", Form.NUMBER, None, Cells("PID", 7)),
        _column("stage", Form.STATE, None, Cells("STAGE", 9)),
        _column("in_flight", Form.COUNT, None, Cells("RUN", 5)),
        _column("age", Form.AGE, None, Cells("AGE", 4), "started_ms"),
        _column("cpu_share", Form.SHARE, None, Cells("CPU%", 4)),
        _column("rss_bytes", Form.BYTES, None, Cells("MEMORY", 9, rank=1)),
        _column("loop_lag_seconds", Form.SECONDS, None, Cells("LAG", 6, rank=2)),
        _column("version", Form.TEXT, None, Cells("VERSION", 8, 14, 3)),
    ),
    "recent": (
        _column("ended", Form.CLOCK, Pixels("Ended", 85), Cells("ENDED", 8), "ended_ms"),
        _column("id", Form.NAME, Pixels("Request", 165, is_long=True), Cells("REQUEST", 13, 45)),
        _column("key", Form.TEXT, Pixels("Key", 92), Cells("KEY", 6, 16, 6)),
        _column("model", Form.TEXT, Pixels("Model", is_long=True), Cells("MODEL", 6, 28, 3)),
        _column("endpoint", Form.TEXT, Pixels("Endpoint", 90), None),
        _column("status", Form.NUMBER, Pixels("Status", 70), Cells("CODE", 4)),
        _column("outcome", Form.STATE, Pixels("Outcome", 95), Cells("OUTCOME", 9)),
        _column("why", Form.OWN_TEXT, Pixels("Finish or code", 125), None),
        _column("took", Form.OWN_FIGURE, Pixels("Took", 80), Cells("TOOK", 6)),
        _column("wait", Form.SECONDS, Pixels("Wait", 75), Cells("WAIT", 5, rank=7), "queued_seconds"),
        _column("ttft", Form.SECONDS, Pixels("TTFT", 75), Cells("TTFT", 5, rank=2), "ttft_seconds"),
        _column("in", Form.RATIO, Pixels("In/cached", 110), Cells("IN/CACHED", 15, rank=5), "prompt_tokens cached_tokens"),
        _column("out", Form.COUNT, Pixels("Out", 70), Cells("OUT", 6, rank=4), "output_tokens"),
        _column("finish_reason", Form.TEXT, None, Cells("FINISH", 8, 12, 8)),
        _column("worker", Form.OWN_TEXT, Pixels("Worker", 90), Cells("WORKER", 6, 16, 9, keeps_tail=True)),
        _column("tries", Form.COUNT, Pixels("Tries", 60), Cells("TRIES", 5, rank=10), "attempts"),
        _column("message", Form.OWN_TEXT, None, Cells("MESSAGE", 10, 60, 1)),
    ),
    "routing": (
        _column("at", Form.CLOCK, Pixels("At", 85), Cells("AT", 8), "at_ms"),
        _column("request", Form.NAME, Pixels("Request", 200), Cells("REQUEST", 13, 45), "request_id"),
        _column("model", Form.TEXT, Pixels("Model"), Cells("MODEL", 6, 28, 3)),
        _column("stage", Form.TEXT, Pixels("Stage", 80), Cells("STAGE", 7, rank=2)),
        _column("policy", Form.TEXT, Pixels("Policy", 120), Cells("POLICY", 8, 16, 4)),
        _column("chosen", Form.OWN_TEXT, Pixels("Chosen", 150), Cells("CHOSEN", 8, 16, keeps_tail=True)),
        _column("overlap", Form.OWN_FIGURE, None, Cells("OVERLAP", 7, rank=1)),
        _column("of", Form.OWN_FIGURE, Pixels("Candidates", 100), Cells("OF", 4, rank=5)),
        _column("out", Form.OWN_FIGURE, Pixels("Left out", 85), None),
        _column("by", Form.TEXT, Pixels("Decided by"), Cells("DECIDED BY", 14, 60), "decided_by"),
    ),
    "caches": (
        _column("id", Form.NAME, Pixels("Worker", 130), Cells("ID", 6, 16, keeps_tail=True)),
        _column("role", Form.TEXT, Pixels("Role", 62), Cells("ROLE", 7, rank=4)),
        _column("model", Form.TEXT, Pixels("Model", is_long=True), Cells("MODEL", 6, 28, 2)),
        _column("known", Form.COUNT, Pixels("Blocks known", 180, "blocks of it in the index of this router, of those on its device", is_long=True), Cells("KNOWN", 7), "blocks_known"),
        _column("blocks_total", Form.COUNT, None, Cells("TOTAL", 7, rank=3)),
        _column("index", Form.SHARE, Pixels("Of the index", 100, "its part of all blocks that the index knows"), Cells("INDEX%", 6, rank=5), "index_share"),
        _column("tiers", Form.OWN_TEXT, Pixels("Tiers", 120), None),
        _column("hits", Form.SHARE, Pixels("Hit rate", 76, "of the prompt tokens of requests that ended within a minute, those that it had cached"), Cells("HIT%", 4), "hit_share"),
        _column("rate", Form.COUNT, Pixels("Hit blocks/min", 128), Cells("HITS/MIN", 8), "hit_blocks_per_minute"),
        _column("history", Form.OWN_TEXT, Pixels("Five minutes", 112), Cells("5 MIN", 12, 30, 1)),
        _column("evicted", Form.COUNT, Pixels("Evicted/min", 106, "blocks that it removed within a minute, by its KV events"), Cells("EVICT/MIN", 9, rank=4), "evicted_blocks_per_minute"),
        _column("gaps", Form.COUNT, Pixels("Gaps", 60, "how often some of its KV events were missing, since this frontend follows them"), Cells("GAPS", 4, rank=6)),
        _column("resyncs", Form.COUNT, Pixels("Resyncs", 80, "how often it had to send its whole state again, since this frontend follows its KV events"), Cells("RESYNCS", 7, rank=6)),
        _column("trust", Form.TEXT, Pixels("Known by", 84, "exact: every event was applied; degraded: some were lost; predicted: only by what was routed there"), Cells("TRUST", 9, rank=7)),
    ),
    "prefixes": (
        _column("id", Form.NAME, Pixels("Prefix", 170, "hash of its last block"), Cells("PREFIX", 10, 18)),
        _column("model", Form.TEXT, Pixels("Model", is_long=True), Cells("MODEL", 6, 28, 2)),
        _column("blocks", Form.COUNT, Pixels("Blocks", 200, is_long=True), Cells("BLOCKS", 7)),
        _column("depth", Form.COUNT, Pixels("Depth", 80, "blocks from the beginning of the prompt to its end"), Cells("DEPTH", 6, rank=1)),
        _column("hits", Form.COUNT, Pixels("Hits", 90, "of the last 200 prompts that were routed, those that begin with some of it"), Cells("HITS", 7)),
        _column("held", Form.OWN_FIGURE, Pixels("Holders", 80), Cells("HELD BY", 7)),
        _column("by", Form.OWN_TEXT, Pixels("Held by", is_long=True), Cells("WORKERS", 12, 80)),
    ),
    "errors": (
        _column("status", Form.NUMBER, Pixels("Status", 70), Cells("CODE", 4)),
        _column("code", Form.TEXT, Pixels("Code", 170), Cells("KIND", 10, 24, 2)),
        _column("count", Form.COUNT, Pixels("Count", 75), Cells("COUNT", 6)),
        _column("rate", Form.RATE, Pixels("Per minute", 95), Cells("/MIN", 5, rank=1), "per_minute"),
        _column("first", Form.AGE, Pixels("First", 85, "since the first one"), Cells("FIRST", 5, rank=5), "first_ms"),
        _column("last", Form.AGE, Pixels("Last", 85, "since the last one"), Cells("LAST", 5), "last_ms"),
        _column("model", Form.TEXT, Pixels("Model", 150), Cells("MODEL", 6, 20, 3)),
        _column("worker", Form.TEXT, Pixels("Worker", 130), Cells("WORKER", 6, 16, 4, keeps_tail=True)),
        _column("message", Form.TEXT, Pixels("Message", is_long=True), Cells("MESSAGE", 20, 90)),
        _column("example", Form.TEXT, None, Cells("EXAMPLE", 13, 45, 10)),
    ),
    "events": (  # the page has them as a list
        _column("at", Form.CLOCK, None, Cells("AT", 8), "at_ms"),
        _column("kind", Form.NAME, None, Cells("KIND", 18, 20)),
        _column("worker", Form.TEXT, None, Cells("WORKER", 6, 16, 2, keeps_tail=True)),
        _column("model", Form.TEXT, None, Cells("MODEL", 6, 20, 3)),
        _column("by", Form.TEXT, None, Cells("BY", 6, 16, 4)),
        _column("text", Form.TEXT, None, Cells("WHAT", 24, 120)),
        _column("request_id", Form.TEXT, None, Cells("REQUEST", 13, 45, 10)),
    ),
})  # fmt: skip
"""By the name of the view, in the order in which both show them."""


def columns_of_page() -> dict[str, list[dict[str, object]]]:
    """Return what the page needs of its columns, as JSON has it."""
    return {
        view: [
            {
                "id": column.id,
                "form": column.form,
                "of": column.members,
                "label": page.label,
                "title": page.help,
                "width": page.width,
                "isNumber": column.form.is_number,
                "isWide": page.width == 0,
                "isLong": page.is_long,
            }
            for column in columns
            if (page := column.page) is not None
        ]
        for view, columns in COLUMNS.items()
    }

"""The columns of every view of the inspector, written once: its page and the terminal draw their tables from these.

A column states which members of an entry it shows, and in which form. What only one of the two shows has no place in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

__all__ = ["COLUMNS", "Form", "PageColumn", "TerminalColumn", "ViewColumn", "columns_of_page"]


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


class PageColumn(Struct, frozen=True):
    """A column on the page."""

    label: str
    width: int = 0  # 0: it shares the room that is left
    help: str = ""
    is_long: bool = False  # has a line of its own where rows are cards


class TerminalColumn(Struct, frozen=True):
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
    page: PageColumn | None
    terminal: TerminalColumn | None


def _column(
    name: str, form: Form, page: PageColumn | None, terminal: TerminalColumn | None, of: str = ""
) -> ViewColumn:
    """Make a column of the members `of`; without them, of the member that has its name."""
    return ViewColumn(name, form, tuple((of or name).split()), page, terminal)


COLUMNS: Final[Mapping[str, tuple[ViewColumn, ...]]] = MappingProxyType({
    "workers": (
        _column("id", Form.NAME, PageColumn("Worker", 140), TerminalColumn("ID", 6, 16, keeps_tail=True)),
        _column("role", Form.TEXT, PageColumn("Role", 62), TerminalColumn("ROLE", 7, rank=4)),
        _column("models", Form.NAMES, PageColumn("Models", 140, is_long=True), TerminalColumn("MODEL", 6, 28, 1)),
        _column("state", Form.STATE, PageColumn("State", 112), TerminalColumn("STATE", 11)),
        _column("load", Form.RATIO, PageColumn("Run/limit", 120), TerminalColumn("RUN/LIM", 9), "running limit"),
        _column("queue", Form.COUNT, PageColumn("Queue", 75, "requests in its queue, and the age of the oldest"), TerminalColumn("QUE", 3, rank=2), "queued"),
        _column("age", Form.AGE, PageColumn("Age", 72), TerminalColumn("AGE", 4, rank=5), "since_ms"),
        _column("rate", Form.RATE, PageColumn("Tok/s", 75), TerminalColumn("TOK/S", 6, rank=1), "output_tokens_per_second"),
        _column("kv", Form.OWN_FIGURE, PageColumn("KV", 105, "KV blocks in use"), TerminalColumn("KV%", 7, 12, 3)),
        _column("hits", Form.SHARE, PageColumn("Hits", 70, "prompt tokens found in its cache"), TerminalColumn("HIT%", 4, rank=6), "prefix_hit_share"),
        _column("silent", Form.SILENCE, PageColumn("Silent", 65, "the longest silence of one of its streams"), TerminalColumn("SILENT", 6, rank=7), "silent_ms"),
        _column("wire", Form.TEXT, None, TerminalColumn("WIRE", 6, rank=11)),
        _column("address", Form.TEXT, None, TerminalColumn("ADDRESS", 15, 24, 12)),
        _column("adapters", Form.NAMES, None, TerminalColumn("ADAPTERS", 8, 20, 14)),
        _column("version", Form.TEXT, None, TerminalColumn("VERSION", 8, 12, 13)),
        _column("card", Form.TEXT, None, TerminalColumn("CARD", 8, rank=15)),
        _column("note", Form.OWN_TEXT, PageColumn("Note", is_long=True), TerminalColumn("NOTE", 12, 60, 2)),
    ),
    "streams": (
        _column("id", Form.NAME, PageColumn("Request", 140), TerminalColumn("REQUEST", 13, 45)),
        _column("key", Form.TEXT, PageColumn("Key", 92), TerminalColumn("KEY", 6, 16, 6)),
        _column("model", Form.TEXT, PageColumn("Model", is_long=True), TerminalColumn("MODEL", 6, 28, 4)),
        _column("endpoint", Form.TEXT, PageColumn("Endpoint", 70), TerminalColumn("ENDPOINT", 10, 22, 11)),
        _column("phase", Form.STATE, PageColumn("Phase", 140), TerminalColumn("PHASE", 10)),
        _column("age", Form.AGE, PageColumn("Age", 66), TerminalColumn("AGE", 4), "started_ms"),
        _column("wait", Form.SECONDS, PageColumn("Wait", 58, "time in queues"), TerminalColumn("WAIT", 5, rank=7), "queued_seconds"),
        _column("ttft", Form.SECONDS, PageColumn("TTFT", 72, "time to the first token"), TerminalColumn("TTFT", 5, rank=5), "ttft_seconds"),
        _column("in", Form.RATIO, PageColumn("In/cached", 100, "tokens of the prompt, and those found in a cache"), TerminalColumn("IN/CACHED", 15, rank=8), "prompt_tokens cached_tokens"),
        _column("out", Form.RATIO, PageColumn("Out/max", 100, "tokens so far, and at most"), TerminalColumn("OUT/MAX", 11, rank=2), "output_tokens max_tokens"),
        _column("rate", Form.RATE, PageColumn("Tok/s", 54), TerminalColumn("TOK/S", 6, rank=3), "tokens_per_second"),
        _column("last", Form.SILENCE, PageColumn("Last", 58, "since the last token"), TerminalColumn("LAST", 6), "last_token_ms"),
        _column("worker", Form.OWN_TEXT, PageColumn("Worker", 86), TerminalColumn("WORKER", 6, 16, 1, keeps_tail=True)),
        _column("attempt", Form.COUNT, PageColumn("Try", 42, "which attempt runs"), None),
        _column("n", Form.COUNT, PageColumn("n", 34, "choices"), TerminalColumn("N", 2, rank=13), "choices"),
        _column("priority", Form.COUNT, None, TerminalColumn("PRIO", 4, rank=12)),
        _column("client_request_id", Form.TEXT, None, TerminalColumn("CLIENT ID", 10, 36, 14)),
        _column("client", Form.BYTES, PageColumn("Unsent", 60, "bytes that wait for the client to read them"), None, "client_bytes_waiting"),
        _column("remark", Form.OWN_TEXT, None, TerminalColumn("", 9, 26)),
    ),
    "models": (
        _column("name", Form.NAME, PageColumn("Model"), TerminalColumn("MODEL", 14, 48)),
        _column("namespace", Form.TEXT, PageColumn("Namespace", 110), TerminalColumn("NAMESPACE", 9, 16, 5)),
        _column("ready", Form.OWN_TEXT, PageColumn("Ready", 250, is_long=True), TerminalColumn("STATE", 9)),
        _column("workers", Form.OWN_TEXT, PageColumn("Workers", 130), TerminalColumn("WORKERS", 9, 30)),
        _column("flight", Form.RATIO, PageColumn("In flight", 90), TerminalColumn("RUN/LIM", 9), "in_flight limit"),
        _column("waiting", Form.COUNT, PageColumn("Waiting", 80), TerminalColumn("WAIT", 4, rank=1)),
        _column("context", Form.SIZE, PageColumn("Context", 90), TerminalColumn("CONTEXT", 8, rank=3), "context_length"),
        _column("block", Form.COUNT, PageColumn("Block", 65), TerminalColumn("BLOCK", 5, rank=6), "block_size"),
        _column("mode", Form.TEXT, PageColumn("Router", 110), TerminalColumn("ROUTER", 6, 14, 4), "router_mode"),
        _column("types", Form.NAMES, PageColumn("Types", 170), TerminalColumn("TYPES", 8, 30, 7)),
        _column("parent", Form.TEXT, None, TerminalColumn("BASE", 6, 20, 8)),
        _column("adapters", Form.NAMES, PageColumn("Adapters", 120), TerminalColumn("ADAPTERS", 8, 24, 9)),
        _column("aliases", Form.NAMES, None, TerminalColumn("ALIASES", 8, 24, 10)),
        _column("why_not", Form.TEXT, None, TerminalColumn("WHY NOT", 14, 60, 2)),
    ),
    "residents": (
        _column("name", Form.NAME, PageColumn("Model", is_long=True), TerminalColumn("NAME", 8, 28)),
        _column("state", Form.STATE, PageColumn("State", 112), TerminalColumn("STATE", 9)),
        _column("memory", Form.BYTES, PageColumn("Memory", 95), TerminalColumn("MEMORY", 8), "taken_bytes"),
        _column("needs", Form.BYTES, PageColumn("Needs", 95, "to load it; an estimate, until it was loaded once"), TerminalColumn("NEEDS", 8, rank=4), "needed_bytes"),
        _column("running", Form.COUNT, PageColumn("Run", 62, "requests"), TerminalColumn("RUN", 4)),
        _column("waiting", Form.COUNT, PageColumn("Wait", 66, "requests that wait for it to be loaded"), TerminalColumn("WAIT", 4)),
        _column("used", Form.AGE, PageColumn("Used", 72, "since its last request, or since it was loaded"), TerminalColumn("USED", 4, rank=3), "used_ms"),
        _column("pinned", Form.OWN_TEXT, PageColumn("Pinned", 80), TerminalColumn("PINNED", 6, rank=2), "is_pinned"),
        _column("presets", Form.NAMES, PageColumn("Presets", 150), TerminalColumn("PRESETS", 8, 30, 5)),
        _column("why", Form.TEXT, PageColumn("Why", is_long=True), TerminalColumn("WHY", 14, 80, 1)),
    ),
    "frontends": (  # the page has them as panels
        _column("id", Form.NAME, None, TerminalColumn("ID", 10, 20)),
        _column("host", Form.TEXT, None, TerminalColumn("HOST", 10, 24)),
        _column("pid", Form.NUMBER, None, TerminalColumn("PID", 7)),
        _column("stage", Form.STATE, None, TerminalColumn("STAGE", 9)),
        _column("in_flight", Form.COUNT, None, TerminalColumn("RUN", 5)),
        _column("age", Form.AGE, None, TerminalColumn("AGE", 4), "started_ms"),
        _column("cpu_share", Form.SHARE, None, TerminalColumn("CPU%", 4)),
        _column("rss_bytes", Form.BYTES, None, TerminalColumn("MEMORY", 9, rank=1)),
        _column("loop_lag_seconds", Form.SECONDS, None, TerminalColumn("LAG", 6, rank=2)),
        _column("version", Form.TEXT, None, TerminalColumn("VERSION", 8, 14, 3)),
    ),
    "recent": (
        _column("ended", Form.CLOCK, PageColumn("Ended", 85), TerminalColumn("ENDED", 8), "ended_ms"),
        _column("id", Form.NAME, PageColumn("Request", 165, is_long=True), TerminalColumn("REQUEST", 13, 45)),
        _column("key", Form.TEXT, PageColumn("Key", 92), TerminalColumn("KEY", 6, 16, 6)),
        _column("model", Form.TEXT, PageColumn("Model", is_long=True), TerminalColumn("MODEL", 6, 28, 3)),
        _column("endpoint", Form.TEXT, PageColumn("Endpoint", 90), None),
        _column("status", Form.NUMBER, PageColumn("Status", 70), TerminalColumn("CODE", 4)),
        _column("outcome", Form.STATE, PageColumn("Outcome", 95), TerminalColumn("OUTCOME", 9)),
        _column("why", Form.OWN_TEXT, PageColumn("Finish or code", 125), None),
        _column("took", Form.OWN_FIGURE, PageColumn("Took", 80), TerminalColumn("TOOK", 6)),
        _column("wait", Form.SECONDS, PageColumn("Wait", 75), TerminalColumn("WAIT", 5, rank=7), "queued_seconds"),
        _column("ttft", Form.SECONDS, PageColumn("TTFT", 75), TerminalColumn("TTFT", 5, rank=2), "ttft_seconds"),
        _column("in", Form.RATIO, PageColumn("In/cached", 110), TerminalColumn("IN/CACHED", 15, rank=5), "prompt_tokens cached_tokens"),
        _column("out", Form.COUNT, PageColumn("Out", 70), TerminalColumn("OUT", 6, rank=4), "output_tokens"),
        _column("finish_reason", Form.TEXT, None, TerminalColumn("FINISH", 8, 12, 8)),
        _column("worker", Form.OWN_TEXT, PageColumn("Worker", 90), TerminalColumn("WORKER", 6, 16, 9, keeps_tail=True)),
        _column("tries", Form.COUNT, PageColumn("Tries", 60), TerminalColumn("TRIES", 5, rank=10), "attempts"),
        _column("message", Form.OWN_TEXT, None, TerminalColumn("MESSAGE", 10, 60, 1)),
    ),
    "routing": (
        _column("at", Form.CLOCK, PageColumn("At", 85), TerminalColumn("AT", 8), "at_ms"),
        _column("request", Form.NAME, PageColumn("Request", 200), TerminalColumn("REQUEST", 13, 45), "request_id"),
        _column("model", Form.TEXT, PageColumn("Model"), TerminalColumn("MODEL", 6, 28, 3)),
        _column("stage", Form.TEXT, PageColumn("Stage", 80), TerminalColumn("STAGE", 7, rank=2)),
        _column("policy", Form.TEXT, PageColumn("Policy", 120), TerminalColumn("POLICY", 8, 16, 4)),
        _column("chosen", Form.OWN_TEXT, PageColumn("Chosen", 150), TerminalColumn("CHOSEN", 8, 16, keeps_tail=True)),
        _column("overlap", Form.OWN_FIGURE, None, TerminalColumn("OVERLAP", 7, rank=1)),
        _column("of", Form.OWN_FIGURE, PageColumn("Candidates", 100), TerminalColumn("OF", 4, rank=5)),
        _column("out", Form.OWN_FIGURE, PageColumn("Left out", 85), None),
        _column("by", Form.TEXT, PageColumn("Decided by"), TerminalColumn("DECIDED BY", 14, 60), "decided_by"),
    ),
    "caches": (
        _column("id", Form.NAME, PageColumn("Worker", 130), TerminalColumn("ID", 6, 16, keeps_tail=True)),
        _column("role", Form.TEXT, PageColumn("Role", 62), TerminalColumn("ROLE", 7, rank=4)),
        _column("model", Form.TEXT, PageColumn("Model", is_long=True), TerminalColumn("MODEL", 6, 28, 2)),
        _column("known", Form.COUNT, PageColumn("Blocks known", 180, "blocks of it in the index of this router, of those on its device", is_long=True), TerminalColumn("KNOWN", 7), "blocks_known"),
        _column("blocks_total", Form.COUNT, None, TerminalColumn("TOTAL", 7, rank=3)),
        _column("index", Form.SHARE, PageColumn("Of the index", 100, "its part of all blocks that the index knows"), TerminalColumn("INDEX%", 6, rank=5), "index_share"),
        _column("tiers", Form.OWN_TEXT, PageColumn("Tiers", 120), None),
        _column("hits", Form.SHARE, PageColumn("Hit rate", 76, "of the prompt tokens of requests that ended within a minute, those that it had cached"), TerminalColumn("HIT%", 4), "hit_share"),
        _column("rate", Form.COUNT, PageColumn("Hit blocks/min", 128), TerminalColumn("HITS/MIN", 8), "hit_blocks_per_minute"),
        _column("history", Form.OWN_TEXT, PageColumn("Five minutes", 112), TerminalColumn("5 MIN", 12, 30, 1)),
        _column("evicted", Form.COUNT, PageColumn("Evicted/min", 106, "blocks that it removed within a minute, by its KV events"), TerminalColumn("EVICT/MIN", 9, rank=4), "evicted_blocks_per_minute"),
        _column("gaps", Form.COUNT, PageColumn("Gaps", 60, "how often some of its KV events were missing, since this frontend follows them"), TerminalColumn("GAPS", 4, rank=6)),
        _column("resyncs", Form.COUNT, PageColumn("Resyncs", 80, "how often it had to send its whole state again, since this frontend follows its KV events"), TerminalColumn("RESYNCS", 7, rank=6)),
        _column("trust", Form.TEXT, PageColumn("Known by", 84, "exact: every event was applied; degraded: some were lost; predicted: only by what was routed there"), TerminalColumn("TRUST", 9, rank=7)),
    ),
    "prefixes": (
        _column("id", Form.NAME, PageColumn("Prefix", 170, "hash of its last block"), TerminalColumn("PREFIX", 10, 18)),
        _column("model", Form.TEXT, PageColumn("Model", is_long=True), TerminalColumn("MODEL", 6, 28, 2)),
        _column("blocks", Form.COUNT, PageColumn("Blocks", 200, is_long=True), TerminalColumn("BLOCKS", 7)),
        _column("depth", Form.COUNT, PageColumn("Depth", 80, "blocks from the beginning of the prompt to its end"), TerminalColumn("DEPTH", 6, rank=1)),
        _column("hits", Form.COUNT, PageColumn("Hits", 90, "of the last 200 prompts that were routed, those that begin with some of it"), TerminalColumn("HITS", 7)),
        _column("held", Form.OWN_FIGURE, PageColumn("Holders", 80), TerminalColumn("HELD BY", 7)),
        _column("by", Form.OWN_TEXT, PageColumn("Held by", is_long=True), TerminalColumn("WORKERS", 12, 80)),
    ),
    "errors": (
        _column("status", Form.NUMBER, PageColumn("Status", 70), TerminalColumn("CODE", 4)),
        _column("code", Form.TEXT, PageColumn("Code", 170), TerminalColumn("KIND", 10, 24, 2)),
        _column("count", Form.COUNT, PageColumn("Count", 75), TerminalColumn("COUNT", 6)),
        _column("rate", Form.RATE, PageColumn("Per minute", 95), TerminalColumn("/MIN", 5, rank=1), "per_minute"),
        _column("first", Form.AGE, PageColumn("First", 85, "since the first one"), TerminalColumn("FIRST", 5, rank=5), "first_ms"),
        _column("last", Form.AGE, PageColumn("Last", 85, "since the last one"), TerminalColumn("LAST", 5), "last_ms"),
        _column("model", Form.TEXT, PageColumn("Model", 150), TerminalColumn("MODEL", 6, 20, 3)),
        _column("worker", Form.TEXT, PageColumn("Worker", 130), TerminalColumn("WORKER", 6, 16, 4, keeps_tail=True)),
        _column("message", Form.TEXT, PageColumn("Message", is_long=True), TerminalColumn("MESSAGE", 20, 90)),
        _column("example", Form.TEXT, None, TerminalColumn("EXAMPLE", 13, 45, 10)),
    ),
    "events": (  # the page has them as a list
        _column("at", Form.CLOCK, None, TerminalColumn("AT", 8), "at_ms"),
        _column("kind", Form.NAME, None, TerminalColumn("KIND", 18, 20)),
        _column("worker", Form.TEXT, None, TerminalColumn("WORKER", 6, 16, 2, keeps_tail=True)),
        _column("model", Form.TEXT, None, TerminalColumn("MODEL", 6, 20, 3)),
        _column("by", Form.TEXT, None, TerminalColumn("BY", 6, 16, 4)),
        _column("text", Form.TEXT, None, TerminalColumn("WHAT", 24, 120)),
        _column("request_id", Form.TEXT, None, TerminalColumn("REQUEST", 13, 45, 10)),
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

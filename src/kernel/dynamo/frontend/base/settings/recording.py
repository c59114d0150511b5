"""The settings of recordings: what is kept of requests that failed, which records of all are written, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.settings.readers import SettingReader, integer, mebibytes, milliseconds, number, one_of, switch, text, words
from dynamo.settings.table import setting

MIB: Final = 1024 * 1024
_GROUP: Final = "recording"

REQUEST_END: Final = "request_end"
REQUEST_PAYLOAD: Final = "request_payload"
REQUEST_STREAM: Final = "request_stream"
TOOL: Final = "tool"
KINDS: Final = (REQUEST_END, REQUEST_PAYLOAD, REQUEST_STREAM, TOOL)
SINKS: Final = ("file", "stderr")
_UNBUILT_SINKS: Final = ("nats", "otel", "s3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """Bounds on what is kept of requests. Sizes in bytes."""

    # fmt: off
    keep_failed: int = setting(200, "DYN_KEEP_FAILED", integer(0),
        "How many [failed requests](recording.md#failed-requests) are kept in memory, each as a bundle: what was asked, where "
        "it went, what it met. 0: none; failures are only counted", flag="--keep-failed", group=_GROUP)
    keep_failed_bytes: int = setting(8 * MIB, "DYN_KEEP_FAILED_MB", mebibytes,
        "How much memory they may take")
    keep_failed_content: bool = setting(False, "DYN_KEEP_FAILED_CONTENT", switch,
        "Keep their prompts and media, too. Otherwise only the parameters are kept, and the lengths of texts",
        flag="--keep-failed-content", group=_GROUP)
    # fmt: on


def _listed(known: tuple[str, ...], what: str, unbuilt: tuple[str, ...] = ()) -> SettingReader[tuple[str, ...]]:
    def parse(given: str) -> tuple[str, ...]:
        found = tuple(words.parse(given))
        for each in found:
            if each in unbuilt:
                raise ValueError(f"the {what} {each!r} is not in this version; use {', '.join(known)}")
            if each not in known:
                raise ValueError(f"{each!r} is not a {what}; use {', '.join(known)}")
        if not found:
            raise ValueError(f"no {what} is named; use {', '.join(known)}")
        return found

    return SettingReader(parse, show=",".join)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTraceSettings:
    """What is recorded. Nothing is, and nothing costs anything, unless `is_on`."""

    # fmt: off
    is_on: bool = setting(False, "DYN_REQUEST_TRACE", switch, "Record requests; see [recording](recording.md#recordings)")
    records: tuple[str, ...] = setting((REQUEST_END, TOOL), "DYN_REQUEST_TRACE_RECORDS", _listed(KINDS, "record"),
        "Which records, separated by commas: `request_end` (what became of a request), `request_stream` (when each part of "
        "its answer came), `request_payload` (the request and its answer, with their content), `tool` (nothing writes it in "
        "this version)")
    sinks: tuple[str, ...] = setting(("file",), "DYN_REQUEST_TRACE_SINKS", _listed(SINKS, "sink", _UNBUILT_SINKS),
        "Where they go: `file`, `stderr`")
    path: str = setting("/tmp/dynamo-request-trace", "DYN_REQUEST_TRACE_FILE_PATH", text,
        "The beginning of the names of files: the process id, a number and `.jsonl` or `.jsonl.gz` follow")
    format: str = setting("jsonl_gz", "DYN_REQUEST_TRACE_FILE_FORMAT", one_of("jsonl_gz", "jsonl"), "`jsonl_gz` or `jsonl`")
    capacity: int = setting(1024, "DYN_REQUEST_TRACE_CAPACITY", integer(1),
        "Records that wait to be written; further ones are dropped, and counted in "
        "`dynamo_frontend_request_trace_dropped_total`")
    buffer_bytes: int = setting(MIB, "DYN_REQUEST_TRACE_FILE_BUFFER_BYTES", integer(1024, unit="bytes"),
        "How much is gathered before it is written")
    flush_seconds: float = setting(1.0, "DYN_REQUEST_TRACE_FILE_FLUSH_INTERVAL_MS", milliseconds(1),
        "How long it is gathered at most")
    roll_bytes: int = setting(256 * MIB, "DYN_REQUEST_TRACE_FILE_ROLL_BYTES", integer(64 * 1024, unit="bytes"),
        "A file with so much in it, before it is compressed, is followed by the next one")
    roll_lines: int | None = setting(None, "DYN_REQUEST_TRACE_FILE_ROLL_LINES", integer(1), "The same in lines")
    max_files: int = setting(64, "DYN_REQUEST_TRACE_MAX_FILES", integer(1),
        "How many files of one process are kept; the oldest one is removed")
    sample_ratio: float = setting(1.0, "DYN_REQUEST_TRACE_SAMPLE_RATIO", number(0), "Which part of the requests is recorded, 0 to 1")
    headers: tuple[str, ...] = setting((), "DYN_REQUEST_TRACE_HTTP_HEADER_CAPTURE_LIST", words,
        "Headers that `request_payload` shows, separated by commas. Headers that carry keys never are")
    redact: str | None = setting(None, "DYN_REQUEST_TRACE_REDACT", text,
        "A function `module.function` that gets each record as a dictionary and returns it as it may be written, or None to "
        "drop it. A record for which it fails is dropped. It sees bundles of failed requests with content, too")
    # fmt: on

    @property
    def has_content(self) -> bool:
        """Whether the content of requests and answers is recorded."""
        return self.is_on and REQUEST_PAYLOAD in self.records

    @property
    def has_streams(self) -> bool:
        """Whether the parts of answers are recorded."""
        return self.is_on and REQUEST_STREAM in self.records

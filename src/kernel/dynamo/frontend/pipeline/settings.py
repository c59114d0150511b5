"""The settings of the course of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dynamo.frontend.models.settings import ModelSettings
from dynamo.protocol.guided_limits import GuidedLimits
from dynamo.protocol.openai.body import DEPTH_CEILING, MAX_DEPTH, MAX_ITEMS, MAX_MEMBERS, MAX_MESSAGES
from dynamo.protocol.openai.errors import DEFAULT_OVERLOAD_STATUS, overload_status
from dynamo.runtime.base.http_limits import HttpLimits
from dynamo.settings.readers import (
    SettingReader,
    integer,
    kibibytes,
    mebibytes,
    milliseconds,
    number,
    off_at_zero,
    one_of,
    seconds,
    switch,
)
from dynamo.settings.table import section, setting

MIB: Final = 1024 * 1024
MAX_MIGRATIONS: Final = 2**32 - 1

DEFAULT_MAX_REQUESTS_IN_FLIGHT: Final = 4096
"""Ours: the native frontend has no bound. One request in flight holds its prompt ids and one window of tokens, some tens
of KiB, so this many stay well below a GiB; the engine's own queue is shorter anyway."""

DEFAULT_PEEK_SECONDS: Final = 1.0
"""How long HTTP 200 is held back for the engine's first event, so that an early typed error gets its real status. Longer
than any healthy first token of a short prompt, shorter than the time that a proxy waits for headers."""

KEEP_ALIVE_SECONDS: Final = 15.0  # ours: the native default is off, and then a proxy cuts a long prefill

INLINE_TOKENIZE_CHARACTERS: Final = 2048
"""A prompt up to this long is tokenised on the loop (about 0.5 ms); a longer one in the executor, which releases the
interpreter lock. The hand-over costs about 60 us, so short prompts must not pay it."""

_HTTP: Final = "http"
_CLUSTER: Final = "cluster"
_REQUESTS: Final = "requests"


def _read_overload_status(given: str) -> int:
    if given != str(overload_status(given)):
        raise ValueError(f"{given} is not a status from 200 to 999")
    return int(given)


_overload_status: Final = SettingReader(_read_overload_status)
_reasoning: Final = one_of("reasoning_content", "reasoning")
_never_at_zero: Final = off_at_zero(seconds())
_pings: Final = off_at_zero(milliseconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits(HttpLimits):
    """What the clients of the API may cost, connection by connection."""

    # fmt: off
    # An idle connection takes about 6 KiB.
    max_connections: int = setting(16_384, "DYN_HTTP_MAX_CONNECTIONS", integer(1),
        "Connections at once, fewer where the process may not open so many files; more is a 503")
    header_limit_bytes: int = setting(64 * 1024, "DYN_HTTP_HEADER_LIMIT_KB", kibibytes(4),
        "Size of the request line and headers, and of what stands between the chunks of a body; more is a 431")
    # Proxies add a dozen or two.
    header_count_limit: int = setting(128, "DYN_HTTP_HEADER_COUNT_LIMIT", integer(1),
        "Number of headers; more is a 431")
    header_timeout_seconds: float = setting(15.0, "DYN_HTTP_HEADER_TIMEOUT_SECS", seconds(0.1),
        "From the first byte of a request to the end of its headers; longer is a 408")
    body_limit_bytes: int = setting(45 * MIB, "DYN_HTTP_BODY_LIMIT_MB", mebibytes,
        "Size of a request body; more is a 413")
    # The largest body over 3 Mbit/s.
    body_timeout_seconds: float = setting(120.0, "DYN_HTTP_BODY_TIMEOUT_SECS", seconds(0.1),
        "From the end of the headers to the end of the body; longer is a 408")
    # Longer than the usual proxy keep-alive, so that the proxy closes first.
    idle_seconds: float = setting(75.0, "DYN_HTTP_IDLE_CONNECTION_SECS", seconds(1),
        "How long a connection without a request is kept")
    pipeline_limit: int = setting(16, "DYN_HTTP_PIPELINE_LIMIT", integer(1),
        "Requests of one connection that wait behind the one being answered; more is a 429")
    write_stall_seconds: float = setting(60.0, "DYN_HTTP_WRITE_STALL_SECS", seconds(0.1),
        "How long a client may leave what was sent to it unread; then it is cut, and its work ended")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(ModelSettings):
    """Sizes in bytes, times in seconds; None means off or unknown unless a meaning states otherwise."""

    # fmt: off
    max_requests_in_flight: int = setting(DEFAULT_MAX_REQUESTS_IN_FLIGHT, "DYN_HTTP_MAX_REQUESTS_IN_FLIGHT", integer(1),
        "Requests at once; more are declined with 529 and Retry-After", flag="--max-requests-in-flight", group=_HTTP)
    overload_status: int = setting(DEFAULT_OVERLOAD_STATUS, "DYN_HTTP_OVERLOAD_STATUS_CODE", _overload_status,
        "Status of every \"full\" answer, 200 to 999")
    limits: ApiLimits = section(ApiLimits)
    json_depth_limit: int = setting(MAX_DEPTH, "DYN_HTTP_JSON_DEPTH_LIMIT", integer(4, DEPTH_CEILING),
        "Arrays and objects inside each other, at most 512; more is a 400")
    json_members_limit: int = setting(MAX_MEMBERS, "DYN_HTTP_JSON_MEMBERS_LIMIT", integer(64),
        "Members of all JSON objects in one body; more is a 400, before any is read")
    json_items_limit: int = setting(MAX_ITEMS, "DYN_HTTP_JSON_ITEMS_LIMIT", integer(64),
        "The same of the items of all arrays, token ids among them")
    # Text has about four bytes for a token.
    body_bytes_per_token: int = setting(64, "DYN_HTTP_BODY_BYTES_PER_TOKEN", integer(0, unit="bytes"),
        "A body of more than 16 MiB and so many bytes for each token of the longest context served here is a 400, "
        "before it is read. 0: read every body")
    messages_limit: int = setting(MAX_MESSAGES, "DYN_HTTP_MESSAGES_LIMIT", integer(1),
        "Messages of one conversation; more is a 400")
    peek_seconds: float = setting(DEFAULT_PEEK_SECONDS, "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", milliseconds(),
        "How long the 200 of a stream is held back for the engine's first event")
    keep_alive_seconds: float | None = setting(KEEP_ALIVE_SECONDS, "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", _pings,
        "Silence after which a stream gets a comment; 0: never")
    embedding_tokens_limit: int = setting(300_000, "DYN_HTTP_EMBEDDING_TOKENS_LIMIT", integer(1),
        "How many tokens the inputs of one request for embeddings, classes or scores may have together")
    share_caches: bool = setting(False, "DYN_SHARE_CACHES", switch,
        "Owners of [API keys](keys.md#the-caches-of-the-engines) share the prefix caches of the engines, so that "
        "`cached_tokens` and the time of a first token reveal what others have sent", flag="--share-caches", group="access")
    migration_limit: int | None = setting(None, "DYN_MIGRATION_LIMIT", integer(0, MAX_MIGRATIONS),
        "How many other workers each choice of a request may need, before or after its first token; unset: what the "
        "model's card allows, at least 3", flag="--migration-limit", group=_CLUSTER)
    migration_max_seq_len: int | None = setting(None, "DYN_MIGRATION_MAX_SEQ_LEN", integer(1),
        "A request whose prompt and answer so far are longer than so many tokens does not change its worker",
        flag="--migration-max-seq-len", group=_CLUSTER)
    stall_floor_seconds: float = setting(10.0, "DYN_STALL_FLOOR_SECS", seconds(),
        "Minimum silence before a stream counts as [stalled](migration.md#no-progress); 0: off",
        flag="--stall-floor-seconds", group=_CLUSTER)
    stall_factor: float = setting(20.0, "DYN_STALL_FACTOR", number(1),
        "Nor before so many times its own longest gap between tokens", flag="--stall-factor", group=_CLUSTER)
    first_token_timeout_seconds: float | None = setting(None, "DYN_HTTP_FIRST_TOKEN_TIMEOUT_SECS", _never_at_zero,
        "A worker that has said nothing by then is left for another, or the request ends with 504; 0: never",
        flag="--first-token-timeout-seconds", group=_CLUSTER)
    inter_token_timeout_seconds: float | None = setting(None, "DYN_HTTP_INTER_TOKEN_TIMEOUT_SECS", _never_at_zero,
        "The same between two tokens of a choice", flag="--inter-token-timeout-seconds", group=_CLUSTER)
    backend_stream_timeout_seconds: float | None = setting(None, "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", _never_at_zero,
        "Silence of an engine after which a request goes on at another worker, or ends with 504 where there is none; "
        "0: never", shown="0")
    request_timeout_seconds: float | None = setting(None, "DYN_HTTP_REQUEST_TIMEOUT_SECS", _never_at_zero,
        "From the complete body to the end of the answer; then 504. 0: never",
        flag="--request-timeout-seconds", group=_CLUSTER)
    exclude_tools_when_tool_choice_none: bool = setting(True, "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", switch,
        "Keep the tools out of the prompt when the client sends `tool_choice: none`",
        flag="--exclude-tools-when-tool-choice-none", group=_REQUESTS)
    ignore_unsupported_fields: bool = setting(False, "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", switch,
        "Ignore unknown fields instead of answering 400", flag="--ignore-unsupported-fields", group=_REQUESTS)
    open_guided_objects: bool = setting(False, "DYN_OPEN_GUIDED_OBJECTS", switch,
        "Read schemas of guided output to the letter: an object that lists properties and has no "
        "`additionalProperties` may have others", flag="--open-guided-objects", group=_REQUESTS)
    allow_control_tokens_in_text: bool = setting(False, "DYN_ALLOW_CONTROL_TOKENS_IN_TEXT", switch,
        "Text of messages, tools and documents may spell control tokens such as `<\\|im_end\\|>`; otherwise they are "
        "plain text there", flag="--allow-control-tokens-in-text", group=_REQUESTS)
    reasoning_field_name: str = setting("reasoning_content", "DYN_REASONING_FIELD_NAME", _reasoning,
        "The member of an answer that holds its reasoning: `reasoning_content` or `reasoning`",
        flag="--reasoning-field-name", group=_REQUESTS)
    streaming_tool_dispatch: bool = setting(False, "DYN_ENABLE_STREAMING_TOOL_DISPATCH", switch,
        "Streams also tell every complete tool call in an event of its own, `tool_call_dispatch`",
        flag="--enable-streaming-tool-dispatch", group=_REQUESTS)
    streaming_reasoning_dispatch: bool = setting(False, "DYN_ENABLE_STREAMING_REASONING_DISPATCH", switch,
        "Streams also tell the whole reasoning in an event of its own, `reasoning_dispatch`",
        flag="--enable-streaming-reasoning-dispatch", group=_REQUESTS)
    preprocess_workers: int = setting(0, "DYN_PREPROCESS_WORKERS", integer(0),
        "Threads for long prompts; 0 chooses by the number of processors",
        flag="--dyn-preprocess-workers", group=_REQUESTS)
    completions_max_tokens: int = setting(16, "DYN_COMPLETIONS_MAX_TOKENS", integer(0),
        "How long an answer of `/v1/completions` may get whose request has no `max_tokens`; 0: as the context allows")
    disable_nvext: bool = setting(False, "DYN_DISABLE_FRONTEND_NVEXT", switch, "Ignore `nvext`")
    force_include_usage: bool = setting(False, "DYN_ENABLE_FORCE_INCLUDE_USAGE", switch, "Every stream ends with usage")
    metadata_header_prefix: str = setting("x-dynamo-meta-", "DYN_METADATA_HEADER", SettingReader(str.lower),
        "Request headers with this prefix become request metadata")
    inline_tokenize_characters: int = INLINE_TOKENIZE_CHARACTERS
    guided: GuidedLimits = section(GuidedLimits)
    # fmt: on

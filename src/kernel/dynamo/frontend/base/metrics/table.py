"""The metrics of a frontend as a table; its neighbours count them."""

from __future__ import annotations

from typing import Final

from dynamo.runtime.observe.metrics import Family

_TOKENIZE_BUCKETS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_STAGE_BUCKETS: Final = (*_TOKENIZE_BUCKETS, 2.5, 5.0)
_OVERHEAD_BUCKETS: Final = (0.00001, 0.00005, *_STAGE_BUCKETS, 10.0, 30.0, 60.0, 300.0)
_TEMPLATE_BUCKETS: Final = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)
_MIGRATION_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_EVENT_LOOP_BUCKETS: Final = (0.0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOKENIZER_LATENCY_MS_BUCKETS: Final = (0.5, *(float(2**exponent) for exponent in range(10)))


_WORKER: Final = ("worker_id", "dp_rank", "worker_type")

FAMILIES: Final = (
    Family(
        "requests_started_total",
        "counter",
        "Requests that arrived; `request_type` is `stream` or `unary`",
        (
            "model",
            "endpoint",
            "request_type",
        ),
    ),
    Family(
        "requests_total",
        "counter",
        "Requests that ended; `status` is `success` or `error`",
        (
            "model",
            "endpoint",
            "request_type",
            "status",
            "error_type",
        ),
    ),
    Family(
        "failures_total",
        "counter",
        "Failed requests by the error's class and reason",
        (
            "class",
            "reason",
        ),
    ),
    Family(
        "refusals_total",
        "counter",
        "Requests and connections that a limit of the listener declined or cut; see [limits](settings.md#limits-of-the-listeners)",
        ("limit",),
    ),
    Family("inflight_requests", "gauge", "Requests being handled", ("model",)),
    Family("queued_requests", "gauge", "Requests being handled that wait for their first token", ("model",)),
    Family("active_requests", "gauge", "Requests being handled whose first token came", ("model",)),
    Family("disconnected_clients", "gauge", "Clients that left before their answer ended; only grows"),
    Family(
        "model_cancellation_total",
        "counter",
        "Requests whose client left",
        (
            "model",
            "endpoint",
            "request_type",
        ),
    ),
    Family(
        "model_queue_age_seconds",
        "gauge",
        "How long the oldest request without a token has been waiting while there are more than the workers run at once; measured once a second",
        ("model",),
    ),
    Family(
        "model_shed_total",
        "counter",
        "Requests refused before their prompt was read: `places`, `reserved` (for higher priorities), `queue_age`, `share` (of its project)",
        (
            "model",
            "reason",
        ),
    ),
    Family(
        "model_rejection_total",
        "counter",
        "Requests declined for overload",
        (
            "model",
            "endpoint",
        ),
    ),
    Family("request_duration_seconds", "histogram", "From arrival to end", ("model",)),
    Family("time_to_first_token_seconds", "histogram", "From arrival to the first token", ("model",)),
    Family(
        "inter_token_latency_seconds",
        "histogram",
        "Between tokens; tokens that arrive together share the interval",
        ("model",),
    ),
    Family("input_sequence_tokens", "histogram", "Prompt tokens", ("model",)),
    Family("output_sequence_tokens", "histogram", "Tokens generated, per request", ("model",)),
    Family(
        "cached_tokens",
        "histogram",
        "Prompt tokens served from the prefix cache, where the engine reports them",
        ("model",),
    ),
    Family("output_tokens_total", "counter", "Tokens generated", ("model",)),
    Family("tokenize_seconds", "histogram", "Tokenising one prompt", buckets=_TOKENIZE_BUCKETS),
    Family(
        "tokenizer_latency_ms",
        "histogram",
        "Tokenising one prompt, in milliseconds",
        ("operation",),
        buckets=_TOKENIZER_LATENCY_MS_BUCKETS,
    ),
    Family("template_seconds", "histogram", "Rendering one chat template", buckets=_TEMPLATE_BUCKETS),
    Family(
        "stage_duration_seconds",
        "histogram",
        "One stage of a request: `preprocess`, `route` (picking a worker), `dispatch` (handing the request to its connection); `phase` is empty",
        (
            "stage",
            "phase",
        ),
        buckets=_STAGE_BUCKETS,
    ),
    Family(
        "overhead_seconds",
        "histogram",
        "Where the time of a request went; see [below](#where-the-time-of-a-request-goes)",
        ("stage",),
        buckets=_OVERHEAD_BUCKETS,
    ),
    Family("processes", "gauge", "Frontend processes that answer on this port (`--workers`)"),
    Family("process_restarts_total", "counter", "Frontend processes that ended by themselves and were started again"),
    Family("event_loop_delay_seconds", "histogram", "How late the event loop ran a timer", buckets=_EVENT_LOOP_BUCKETS),
    Family("event_loop_lag_seconds", "gauge", "How late the last of those timers ran"),
    Family("event_loop_stall_total", "counter", "Timers that ran more than 0.1 s late"),
    Family("model_ready", "gauge", "1 while the model serves, 0 after it went", ("model",)),
    Family(
        "model_workers",
        "gauge",
        "Workers whose instance can be reached, by the role in their card",
        (
            "model",
            "worker_type",
        ),
    ),
    Family("model_context_length", "gauge", "Context window in tokens", ("model",)),
    Family("model_total_kv_blocks", "gauge", "KV blocks of one worker", ("model",)),
    Family("model_max_num_seqs", "gauge", "Sequences one worker runs at once", ("model",)),
    Family("model_max_num_batched_tokens", "gauge", "Tokens of one engine step", ("model",)),
    Family("model_kv_cache_block_size", "gauge", "Tokens of one KV block", ("model",)),
    Family("model_migration_limit", "gauge", "Retries on another worker that the model's card allows", ("model",)),
    Family(
        "model_migration_total",
        "counter",
        "Requests tried on another worker: before their first token (new_request) or after it (ongoing_request)",
        (
            "model",
            "migration_type",
        ),
    ),
    Family(
        "model_migration_duration_seconds",
        "histogram",
        "From the loss of a worker to the first output of another worker; the outcome is success, failure or cancelled",
        (
            "model",
            "migration_type",
            "outcome",
        ),
        buckets=_MIGRATION_BUCKETS,
    ),
    Family(
        "stalled_streams_total",
        "counter",
        "Choices that left a worker, or were ended, for want of [progress](migration.md#no-progress): frozen, stuck, first_token or inter_token",
        ("finding",),
    ),
    Family(
        "model_card_conflicts_total",
        "counter",
        "Workers left out because their card differs from the first one's",
        ("model",),
    ),
    Family(
        "model_load_failures_total", "counter", "Failed attempts to load a model's tokenizer and template", ("model",)
    ),
    Family(
        "encoder_requests_total",
        "counter",
        "Requests to encode workers that ended; `outcome` is `success`, `failed` or `cancelled`",
        ("outcome",),
    ),
    Family("encoder_fallbacks_total", "counter", "Requests with media that went on without an encode worker"),
    Family(
        "stage_requests",
        "gauge",
        "Requests in a stage now: `preprocess`, `route` (until a worker got them) or `dispatch` (until their first output); `phase` is empty",
        ("stage", "phase"),
    ),
    Family("tokenizer_cache_hits_total", "counter", "Chunks of prompts whose tokens were in the tokenizer's cache"),
    Family("tokenizer_cache_misses_total", "counter", "Chunks of prompts that had to be tokenised"),
    Family("tokenizer_cache_cached_tokens_total", "counter", "Prompt tokens from the tokenizer's cache", ("model",)),
    Family("tokenizer_cache_uncached_tokens_total", "counter", "Prompt tokens that had to be tokenised", ("model",)),
    Family(
        "worker_active_decode_blocks",
        "gauge",
        "KV blocks of the requests that run at a worker, as it reported; known while its model has [thresholds](settings.md)",
        _WORKER,
    ),
    Family(
        "worker_active_prefill_tokens",
        "gauge",
        "Prompt tokens that wait for their prefill at a worker, as it reported; as above",
        _WORKER,
    ),
    Family(
        "worker_last_time_to_first_token_seconds",
        "gauge",
        "From arrival to the first token, of the last request that a worker answered",
        _WORKER,
    ),
    Family("worker_last_input_sequence_tokens", "gauge", "Prompt tokens of that request", _WORKER),
    Family("worker_last_inter_token_latency_seconds", "gauge", "Mean time between tokens of that request", _WORKER),
)
"""Every metric of a frontend, without its prefix, in the order of the page."""

MODEL_FACTS: Final = (
    "ready", "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "context_length", "kv_cache_block_size",
    "migration_limit",
)  # fmt: skip

"""The names of metrics and labels, without their prefix: dashboards and engines build on them.

A full name is `prefix_name`: `f"{name_prefix.COMPONENT}_{work_handler.REQUESTS_TOTAL}"`.
"""

from __future__ import annotations

from typing import Final, NoReturn

__all__ = [
    "component_names",
    "frontend_service",
    "kv_publisher",
    "kvstats",
    "labels",
    "lifecycle",
    "model_info",
    "name_prefix",
    "request_plane",
    "transport",
    "work_handler",
    "work_handler_pool",
]

_NATIVE_ONLY: Final = frozenset(
    {
        *("distributed_runtime", "frontend_perf", "kvbm", "kvindexer", "kvrouter", "router", "router_request"),
        *("routing_overhead", "task_tracker", "tokio_perf", "trtllm_additional"),
    }
)


def __getattr__(name: str) -> NoReturn:
    if name in _NATIVE_ONLY:
        raise ImportError(
            f"dynamo.prometheus_names.{name} names metrics of a part that dynamo-unified does not have; "
            "docs/metrics.md lists the metrics there are"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class name_prefix:
    """What the full names begin with."""

    COMPONENT: Final = "dynamo_component"
    FRONTEND: Final = "dynamo_frontend"
    WORK_HANDLER: Final = "dynamo_work_handler"
    REQUEST_PLANE: Final = "dynamo_request_plane"
    TRANSPORT_TCP: Final = "dynamo_transport_tcp"
    TRANSPORT_NATS: Final = "dynamo_transport_nats"
    ENGINE: Final = "dynamo_engine"


class labels:
    """Label names."""

    NAMESPACE: Final = "dynamo_namespace"
    COMPONENT: Final = "dynamo_component"
    ENDPOINT: Final = "dynamo_endpoint"
    WORKER_ID: Final = "worker_id"  # lower-case hex of the instance id
    MODEL: Final = "model"
    MODEL_NAME: Final = "model_name"
    DP_RANK: Final = "dp_rank"
    ERROR_TYPE: Final = "error_type"


class work_handler:
    """Prefix `dynamo_component`: one request handler."""

    REQUESTS_TOTAL: Final = "requests_total"
    REQUEST_BYTES_TOTAL: Final = "request_bytes_total"
    RESPONSE_BYTES_TOTAL: Final = "response_bytes_total"
    INFLIGHT_REQUESTS: Final = "inflight_requests"
    REQUEST_DURATION_SECONDS: Final = "request_duration_seconds"
    CANCELLATION_TOTAL: Final = "cancellation_total"
    ERRORS_TOTAL: Final = "errors_total"

    class error_types:
        """Values of the label `error_type`."""

        DESERIALIZATION: Final = "deserialization"
        INVALID_MESSAGE: Final = "invalid_message"
        RESPONSE_STREAM: Final = "response_stream"
        GENERATE: Final = "generate"
        SERIALIZATION: Final = "serialization"
        PUBLISH_RESPONSE: Final = "publish_response"
        PUBLISH_FINAL: Final = "publish_final"


class component_names:
    """Prefix `dynamo_component`: the process."""

    UPTIME_SECONDS: Final = "uptime_seconds"


class lifecycle:
    """Prefix `dynamo_component`: gauges of one engine's life."""

    MODEL_LOAD_TIME_SECONDS: Final = "model_load_time_seconds"
    DRAIN_TIME_SECONDS: Final = "drain_time_seconds"
    CLEANUP_TIME_SECONDS: Final = "cleanup_time_seconds"


class kvstats:
    """Prefix `dynamo_component`: the KV cache, per rank."""

    TOTAL_BLOCKS: Final = "total_blocks"
    GPU_CACHE_USAGE_PERCENT: Final = "gpu_cache_usage_percent"  # a fraction, 0 to 1, despite its name
    KV_CACHE_HIT_RATE: Final = "kv_cache_hit_rate"


class model_info:
    """Prefix `dynamo_component`: how long a model took to load."""

    LOAD_TIME_SECONDS: Final = "model_load_time_seconds"


class kv_publisher:
    """Prefix `dynamo_component`: KV events on their way out."""

    ENGINES_DROPPED_EVENTS_TOTAL: Final = "kv_publisher_engines_dropped_events_total"


class work_handler_pool:
    """Prefix `dynamo_work_handler`: admission."""

    QUEUE_DEPTH: Final = "queue_depth"
    QUEUE_CAPACITY: Final = "queue_capacity"
    POOL_ACTIVE_TASKS: Final = "pool_active_tasks"
    POOL_CAPACITY: Final = "pool_capacity"
    ENQUEUE_REJECTED_TOTAL: Final = "enqueue_rejected_total"
    PERMIT_WAIT_SECONDS: Final = "permit_wait_seconds"
    NETWORK_TRANSIT_SECONDS: Final = "network_transit_seconds"
    TIME_TO_FIRST_RESPONSE_SECONDS: Final = "time_to_first_response_seconds"
    QUEUE_AGE_SECONDS: Final = "queue_age_seconds"
    SILENCE_SECONDS: Final = "silence_seconds"
    LONGEST_SILENCE_SECONDS: Final = "longest_silence_seconds"
    EVENT_LOOP_LAG_SECONDS: Final = "event_loop_lag_seconds"
    EVENT_LOOP_BLOCKS_TOTAL: Final = "event_loop_blocks_total"
    EVENT_LOOP_BLOCKED_SECONDS_TOTAL: Final = "event_loop_blocked_seconds_total"


class request_plane:
    """Prefix `dynamo_request_plane`: the caller's side."""

    QUEUE_SECONDS: Final = "queue_seconds"
    SEND_SECONDS: Final = "send_seconds"
    ROUNDTRIP_TTFT_SECONDS: Final = "roundtrip_ttft_seconds"
    INFLIGHT_REQUESTS: Final = "inflight_requests"
    QUARANTINED_INSTANCES: Final = "quarantined_instances"
    QUARANTINES_TOTAL: Final = "quarantines_total"
    PROBES_TOTAL: Final = "probes_total"


class transport:
    """Prefix `dynamo_transport_tcp`: sockets."""

    BYTES_SENT_TOTAL: Final = "bytes_sent_total"
    BYTES_RECEIVED_TOTAL: Final = "bytes_received_total"
    ERRORS_TOTAL: Final = "errors_total"
    ACCEPT_BACKOFF_TOTAL: Final = "accept_backoff_total"


class frontend_service:
    """Prefix `dynamo_frontend` (or `DYN_METRICS_PREFIX`): the HTTP service."""

    REQUESTS_TOTAL: Final = "requests_total"
    INFLIGHT_REQUESTS: Final = "inflight_requests"
    QUEUED_REQUESTS: Final = "queued_requests"
    DISCONNECTED_CLIENTS: Final = "disconnected_clients"
    REQUEST_DURATION_SECONDS: Final = "request_duration_seconds"
    INPUT_SEQUENCE_TOKENS: Final = "input_sequence_tokens"
    OUTPUT_SEQUENCE_TOKENS: Final = "output_sequence_tokens"
    OUTPUT_TOKENS_TOTAL: Final = "output_tokens_total"
    TIME_TO_FIRST_TOKEN_SECONDS: Final = "time_to_first_token_seconds"
    INTER_TOKEN_LATENCY_SECONDS: Final = "inter_token_latency_seconds"

"""Write the Grafana dashboards of deploy/grafana from the tables below: `make docs`.

A panel names metrics of the code and nothing else; a test holds every expression against the families, their labels and types.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["DASHBOARDS", "FOLDER", "Panel", "dashboard"]

FOLDER: Final = Path(__file__).parent.parent / "deploy" / "grafana"
RATE: Final = "$__rate_interval"
MODEL: Final = 'model=~"$model"'
_WIDTH: Final = 12  # of a panel; a row has 24
_HEIGHT: Final = 8


class Panel(NamedTuple):
    """One graph: its title, its unit as Grafana names it, and lines as (legend, expression)."""

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    meaning: str = ""


def _quantiles(metric: str, selector: str, by: str = "") -> list[tuple[str, str]]:
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return [
        (
            f"{legend}p{name}",
            f"histogram_quantile({part}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[{RATE}])))",
        )
        for name, part in (("50", 0.5), ("99", 0.99))
    ]


def _rate(metric: str, selector: str = "", by: str = "") -> str:
    chosen = f"{{{selector}}}" if selector else ""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{chosen}[{RATE}]))"


def _total(metric: str, selector: str = "", by: str = "") -> str:
    chosen = f"{{{selector}}}" if selector else ""
    return f"sum{f' by ({by})' if by else ''} ({metric}{chosen})"


_FRONTEND: Final = (
    Panel("Requests", "reqps", [("{{status}}", _rate("dynamo_frontend_requests_total", MODEL, "status"))]),
    Panel(
        "Requests in flight", "short",
        [
            ("with a token", _total("dynamo_frontend_active_requests", MODEL)),
            ("without a token yet", _total("dynamo_frontend_queued_requests", MODEL)),
        ],
    ),
    Panel("Time to first token", "s", _quantiles("dynamo_frontend_time_to_first_token_seconds", MODEL)),
    Panel("Time between tokens", "s", _quantiles("dynamo_frontend_inter_token_latency_seconds", MODEL)),
    Panel("Time of a request", "s", _quantiles("dynamo_frontend_request_duration_seconds", MODEL)),
    Panel("Tokens generated", "short", [("{{model}}", _rate("dynamo_frontend_output_tokens_total", MODEL, "model"))]),
    Panel(
        "Failures", "reqps", [("{{class}} {{reason}}", _rate("dynamo_frontend_failures_total", by="class, reason"))],
        "By the class of the error and its reason; docs/errors.md says what to do about each.",
    ),
    Panel(
        "Refused for want of room", "reqps",
        [
            ("{{model}} {{reason}}", _rate("dynamo_frontend_model_shed_total", MODEL, "model, reason")),
            ("limit {{limit}}", _rate("dynamo_frontend_refusals_total", by="limit")),
        ],
        "Requests that got a 529, and connections beyond a limit of the listener.",
    ),
    Panel(
        "Age of the queue", "s", [("{{model}}", f"max by (model) (dynamo_frontend_model_queue_age_seconds{{{MODEL}}})")],
        "How long the oldest request without a token has waited.",
    ),
    Panel("Clients that left", "reqps", [("{{model}}", _rate("dynamo_frontend_model_cancellation_total", MODEL, "model"))]),
    Panel(
        "Requests that changed their worker", "reqps",
        [("{{migration_type}}", _rate("dynamo_frontend_model_migration_total", MODEL, "migration_type"))],
    ),
    Panel("Prompt tokens", "short", _quantiles("dynamo_frontend_input_sequence_tokens", MODEL)),
    Panel("Prompt tokens from the cache", "short", _quantiles("dynamo_frontend_cached_tokens", MODEL)),
    Panel("Lateness of the event loop", "s", _quantiles("dynamo_frontend_event_loop_delay_seconds", "")),
    Panel("Time of a stage", "s", _quantiles("dynamo_frontend_stage_duration_seconds", "", "stage")),
    Panel(
        "Media parts", "reqps", [("{{outcome}}", _rate("dynamo_frontend_media_fetches_total", by="outcome"))],
        "Images, videos and sounds that requests named by a URL: fetched, found in the cache, or refused.",
    ),
    Panel(
        "Memory of media", "bytes",
        [
            ("of requests in flight", _total("dynamo_frontend_media_held_bytes")),
            ("kept for the next request", _total("dynamo_frontend_media_cache_bytes")),
        ],
    ),
    Panel(
        "Batches", "short",
        [
            ("lines without a result", _total("dynamo_frontend_batch_backlog_lines")),
            ("lines per second", _rate("dynamo_frontend_batch_lines_total")),
        ],
    ),
    Panel(
        "Keys: refused", "reqps",
        [("{{key_id}} {{limit}}", _rate("dynamo_frontend_key_rejections_total", by="key_id, limit"))],
    ),
    Panel(
        "Keys: what is left of the budget", "percentunit",
        [("{{key_id}}", "min by (key_id) (dynamo_frontend_key_budget_remaining_ratio)")],
    ),
)  # fmt: skip

_WORKERS: Final = (
    Panel(
        "Workers", "short",
        [("{{model}} {{worker_type}}", f"max by (model, worker_type) (dynamo_frontend_model_workers{{{MODEL}}})")],
    ),
    Panel(
        "Workers that there should be", "short",
        [
            ("{{model}} {{role}} wanted", f"max by (model, role) (dynamo_autoscale_desired_replicas{{{MODEL}}})"),
            ("{{model}} {{role}} ready", f"max by (model, role) (dynamo_autoscale_ready_replicas{{{MODEL}}})"),
        ],
        "docs/scaling.md says how the number is found; it is followed by dynamo serve, KEDA or an HPA.",
    ),
    Panel(
        "Saturation", "percentunit",
        [("{{model}} {{role}}", f"max by (model, role) (dynamo_autoscale_saturation{{{MODEL}}})")],
        "1 is full, averaged over 15 seconds.",
    ),
    Panel("Left out after a failure", "short", [("{{instance}}", "dynamo_request_plane_quarantined_instances")]),
    Panel("Requests at a worker", "short", [("{{worker_id}}", _total("dynamo_component_inflight_requests", by="worker_id"))]),
    Panel("Waiting at a worker", "short", [("{{instance}}", "dynamo_work_handler_queue_depth")]),
    Panel("Age of a worker's queue", "s", [("{{instance}}", "dynamo_work_handler_queue_age_seconds")]),
    Panel(
        "Longest silence of a stream", "s", [("{{instance}}", "dynamo_work_handler_longest_silence_seconds")],
        "How long the request that has been silent for longest had no token.",
    ),
    Panel("Used part of the KV cache", "percentunit", [("{{worker_id}}", "dynamo_component_gpu_cache_usage_percent")]),
    Panel("Prompt blocks that the KV cache held", "percentunit", [("{{worker_id}}", "dynamo_component_kv_cache_hit_rate")]),
    Panel("Errors of a worker", "reqps", [("{{worker_id}} {{error_type}}", _rate("dynamo_component_errors_total", by="worker_id, error_type"))]),
    Panel("Time of a request at a worker", "s", _quantiles("dynamo_component_request_duration_seconds", "", "worker_id")),
    Panel("Prompt that the chosen worker had", "percentunit", _quantiles("dynamo_component_router_kv_hit_rate", "")),
    Panel("Lateness of a worker's event loop", "s", [("{{instance}}", "dynamo_work_handler_event_loop_lag_seconds")]),
    Panel("Processor", "percentunit", [("{{instance}}", f"rate(process_cpu_seconds_total[{RATE}])")]),
    Panel("Memory", "bytes", [("{{instance}}", "process_resident_memory_bytes")]),
)  # fmt: skip

DASHBOARDS: Final = {
    "frontend": ("Dynamo: requests", _FRONTEND),
    "workers": ("Dynamo: workers", _WORKERS),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard as Grafana imports it."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "uid": f"dynamo-{name}",
        "title": title,
        "tags": ["dynamo"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(dynamo_frontend_model_ready, model)",
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(place, panel, source) for place, panel in enumerate(panels)],
    }


def _panel(place: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": source,
        "gridPos": {"x": place % 2 * _WIDTH, "y": place // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(65 + number), "datasource": source, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.lines)
        ],
    }


def main() -> int:
    """Write the files."""
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(json.dumps(dashboard(name), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

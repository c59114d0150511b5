"""A real Envoy in front of a picker: its binary (`make test-gateway` fetches it), and its configuration."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
_KINDS = "type.googleapis.com/envoy.extensions."


def envoy_binary() -> str | None:
    """Return the program; None: it is not there."""
    own = REPOSITORY / ".clients" / "gateway" / "bin" / "envoy"
    return os.environ.get("ENVOY") or (str(own) if own.exists() else shutil.which("envoy"))


BUFFERED = {
    "request_header_mode": "SEND", "request_body_mode": "BUFFERED", "response_header_mode": "SEND",
    "response_body_mode": "NONE",
}  # fmt: skip
SKIPPED = BUFFERED | {"response_header_mode": "SKIP"}
DUPLEX = {
    "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
    "response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND",
}  # fmt: skip


def configuration(
    admin_port: int,
    listeners: Mapping[int, tuple[Mapping[str, str], bool]],
    picker_port: int,
    pool: Sequence[tuple[str, int]],
    *,
    checked: str = "readiness",
) -> str:
    """Write Envoy's configuration. `listeners`: by port the processing mode, and whether it fails open. `checked`: the service
    by whose health the picker is called."""
    return json.dumps(
        {
            "admin": {"address": _socket("127.0.0.1", admin_port)},
            "static_resources": {
                "listeners": [
                    _listener(port, mode, is_open=is_open) for port, (mode, is_open) in listeners.items()
                ],
                "clusters": [_pool(pool), _picker(picker_port, checked)],
            },
        }
    )  # fmt: skip


def _access_log(port: int) -> dict[str, Any]:
    """Write each request to standard output, with the reason of an answer that is Envoy's own."""
    members = {
        "port": port, "path": "%REQ(:PATH)%", "status": "%RESPONSE_CODE%", "flags": "%RESPONSE_FLAGS%",
        "details": "%RESPONSE_CODE_DETAILS%", "upstream": "%UPSTREAM_HOST%", "ms": "%DURATION%",
        "failure": "%UPSTREAM_TRANSPORT_FAILURE_REASON%", "sent": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "destination": "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint)%",
        "served": "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint-served)%",
    }  # fmt: skip
    log = {
        "@type": _KINDS + "access_loggers.stream.v3.StdoutAccessLog",
        "log_format": {"json_format": members},
    }
    return {"name": "envoy.access_loggers.stdout", "typed_config": log}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _listener(port: int, mode: Mapping[str, str], *, is_open: bool) -> dict[str, Any]:
    key = "x-gateway-destination-endpoint-subset"
    hint = {
        "@type": _KINDS + "filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": key,
                "on_header_present": {"metadata_namespace": "envoy.lb.subset_hint", "key": key},
                "remove": True,
            }
        ],
    }
    processing = {
        "@type": _KINDS + "filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": mode,
        "message_timeout": "10s",
        "failure_mode_allow": is_open,
        "status_on_error": {"code": "ServiceUnavailable"},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    retries = {"retry_on": "connect-failure,refused-stream", "num_retries": 1}
    manager = {
        "@type": _KINDS + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": f"on_{port}",
        "access_log": [_access_log(port)],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "response_headers_to_add": [
                        {"header": {"key": "x-upstream", "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
                    ],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "pool", "timeout": "0s", "retry_policy": retries},
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.header_to_metadata", "typed_config": hint},
            {"name": "envoy.filters.http.ext_proc", "typed_config": processing},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": _KINDS + "filters.http.router.v3.Router"},
            },
        ],
    }
    return {
        "name": f"on_{port}",
        "address": _socket("127.0.0.1", port),
        "per_connection_buffer_limit_bytes": 16 * 1024 * 1024,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _pool(pool: Sequence[tuple[str, int]]) -> dict[str, Any]:
    key = "x-gateway-destination-endpoint"
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": _KINDS + "load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": _KINDS + "load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": key}]}}, {"header": key}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{key}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": "pool",
        "connect_timeout": "2s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": _endpoints("pool", pool),
    }


def _picker(port: int, checked: str) -> dict[str, Any]:
    options = {
        "@type": _KINDS + "upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": _endpoints("picker", [("127.0.0.1", port)]),
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": "3s", "interval": "1s", "no_traffic_interval": "1s", "unhealthy_interval": "1s",
                "unhealthy_threshold": 2, "healthy_threshold": 1,
                "grpc_health_check": {"service_name": checked},
            }
        ],
    }  # fmt: skip


def _endpoints(name: str, hosts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _socket(host, port)}} for host, port in hosts]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}

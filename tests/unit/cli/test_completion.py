"""The scripts of `dynamo completion`, run by the shells that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo.cli.completion import SHELLS, words_of_commands
from dynamo.cli.main import COMMANDS, main
from dynamo.settings.choices import ROUTER_MODES
from support.patience import PATIENCE_SECONDS

BASH = """
source {script}
COMP_WORDS=({words} {last})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_dynamo
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# What would show a menu prints what it would show.
ZSH = """
setopt null_glob
compdef() {{ }}
compadd() {{ shift; print -l -- "$@" }}
_describe() {{ print -l -- "${{(@P)@[-1]}}" }}
_files() {{ [[ ${{1:-}} == -/ ]] && print -l *(/) || print -l * }}
source {script}
words=({words} {last})
CURRENT=${{#words}}
_dynamo
"""
FISH = """
source {script}
complete -C {line}
"""


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed here (apt install {name})")
    return name


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    commands = words_of_commands()
    for name, write in SHELLS.items():
        (folder / name).write_text(write(commands))
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "plan.toml").touch()
    return tmp_path


def offered(shell: str, lines: list[str], scripts: Path, here: Path) -> list[set[str]]:
    """Return what the shell offers for the last word of each line, which may be empty. One process tries all of them."""
    texts = []
    for line in lines:
        *words, last = line.split(" ")
        typed = " ".join(words)
        texts.append(
            {
                "bash": BASH.format(script=scripts / "bash", words=typed, last=f"'{last}'"),
                "zsh": ZSH.format(script=scripts / "zsh", words=typed, last=f"'{last}'"),
                "fish": FISH.format(script=scripts / "fish", line=f"'{line}'"),
            }[shell]
        )
    arguments = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *arguments, "-c", "echo '<>'\n".join(texts)],
        cwd=here, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert [error for error in done.stderr.splitlines() if "compopt" not in error] == []  # it needs a real completion
    found = []
    for line, part in zip(lines, done.stdout.split("<>\n"), strict=True):
        words_shown = {re.split(r"[:\t]", shown)[0].rstrip("/") for shown in part.splitlines() if shown}
        found.append({word for word in words_shown if word.startswith(line.rpartition(" ")[2])})
    return found


def test_what_is_offered_is_what_may_stand_there(shell: str, scripts: Path, here: Path) -> None:
    expected = {
        "dynamo ": set(COMMANDS),
        "dynamo se": {"serve"},
        "dynamo serve --wor": {"--workers"},
        "dynamo bench replay --see": {"--seeds"},
        "dynamo keys create --re": {"--revoke-now"},
        "dynamo chat --wor": set(),  # a flag of another command
        "dynamo serve --workers 2 --router-mode ": set(ROUTER_MODES),
        "dynamo serve --engine sgl": {"sglang"},
        "dynamo serve --workers ": set(),  # nobody can guess it
        "dynamo serve --config p": {"plan.toml"},
        "dynamo serve --store ": {"models"},
        "dynamo serve m": {"models"},
        "dynamo mod": {"models"},
        "dynamo explain p": {"plan.toml"},
        "dynamo chat keys cre": set(),  # `keys` is a command in the first place only
        "dynamo keys rot": {"rotate"},
        "dynamo bench rep": {"replay"},
        "dynamo bench replay moon": {"mooncake"},
        "dynamo completion ": set(SHELLS),
    }
    found = offered(shell, list(expected), scripts, here)
    assert dict(zip(expected, found, strict=True)) == expected


def test_every_command_has_its_words() -> None:
    words = {command.path for command in words_of_commands()}
    assert {(name,) for name in COMMANDS} | {(), ("bench", "replay"), ("keys", "rotate")} <= words


def test_the_command_prints_the_script_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.endswith("complete -F _dynamo dynamo\n")
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err

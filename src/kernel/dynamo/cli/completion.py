"""`dynamo completion SHELL`: a script that completes commands, flags and their values, made from the parsers themselves.

The script holds all words: pressing the tab key starts no process.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dynamo.cli.engines import BUILT_IN
from dynamo.cli.main import COMMANDS
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import choices_of

# The parsers of all commands, for what describes them: completion of a shell, and the test of the settings page.

# Words that may stand behind a flag, although others may, too.
FLAG_WORDS: Final = {"--engine": tuple(sorted(BUILT_IN))}

HOMES: Final = {
    **{name: module for name, (module, _) in COMMANDS.items()},
    "bench": "dynamo.cli.bench.options",
    "bench replay": "dynamo.cli.bench.replay.options",
}
"""The module with `build_parser()`, or `build_parser(environment)`, of each command."""


def first_words() -> dict[str, tuple[str, ...]]:
    """Return the words that may come first behind a command, although others may, too."""
    presets = importlib.import_module("dynamo.replay.presets").PRESETS
    return {"conformance": tuple(sorted(BUILT_IN)), "bench replay": tuple(presets)}


def command_parsers() -> dict[str, CommandParser]:
    """Make the parser of each command, by its name (`bench replay` is one); no environment is read."""
    return {name: _parser_of(home) for name, home in HOMES.items()}


def _parser_of(home: str) -> CommandParser:
    build = importlib.import_module(home).build_parser
    parser: CommandParser = build({}) if inspect.signature(build).parameters else build()
    return parser


_EPILOG: Final = """\
bash:  dynamo completion bash > ~/.local/share/bash-completion/completions/dynamo
zsh:   dynamo completion zsh > "${fpath[1]}/_dynamo"
fish:  dynamo completion fish > ~/.config/fish/completions/dynamo.fish

example:
  dynamo completion bash
"""


class Takes(enum.Enum):
    """What stands behind a flag."""

    NOTHING = enum.auto()
    FILE = enum.auto()
    FOLDER = enum.auto()
    WORD = enum.auto()
    """One of a list, or a text that cannot be guessed."""


@dataclass(frozen=True, slots=True)
class WordsOfFlag:
    """One flag in its spellings."""

    names: tuple[str, ...]
    help: str
    takes: Takes
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WordsOfCommand:
    """What may follow a command; `path` is empty for `dynamo` itself."""

    path: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]  # name and help
    flags: tuple[WordsOfFlag, ...]
    values: tuple[str, ...] = ()  # of its first argument
    takes_files: bool = False


def main(argv: list[str]) -> int:
    """Print the script; the exit status."""
    given = build_parser().parse_args(argv)
    print(SHELLS[given.shell](words_of_commands()), end="")
    return 0


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo completion", description="Print a script that completes this command in a shell.", epilog=_EPILOG
    )
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=", ".join(SHELLS))
    return parser


# -- the words --------------------------------------------------------------------------------------------------------


def words_of_commands() -> list[WordsOfCommand]:
    """Return the words of `dynamo` itself and of each of its commands."""
    parsers = {tuple(name.split()): parser for name, parser in command_parsers().items()}
    known: dict[tuple[str, ...], str] = {(name,): what for name, (_, what) in COMMANDS.items()}
    known |= {path: parser.description or "" for path, parser in parsers.items() if len(path) > 1}
    top = (WordsOfFlag(("-h", "--help"), "explain dynamo", Takes.NOTHING),
           WordsOfFlag(("-V", "--version"), "print the version", Takes.NOTHING))  # fmt: skip
    found = [WordsOfCommand((), tuple((name, what) for name, (_, what) in COMMANDS.items()), top)]
    for path, parser in parsers.items():
        below = tuple((other[-1], known[other]) for other in parsers if other[:-1] == path)
        found += _words(path, parser, below, first_words().get(" ".join(path), ()))
    return found


def _words(
    path: tuple[str, ...], parser: argparse.ArgumentParser, below: tuple[tuple[str, str], ...], values: tuple[str, ...]
) -> Iterator[WordsOfCommand]:
    flags: list[WordsOfFlag] = []
    commands, takes_files = list(below), False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += [(choice.dest, choice.help or "") for choice in action._choices_actions]
            for name, inner in action.choices.items():
                yield from _words((*path, name), inner, (), ())
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            listed = choices_of(action) or FLAG_WORDS.get(action.option_strings[0], ())
            meaning = (action.help or "").replace("%%", "%").split(" (default")[0].split(" [")[0]
            flags.append(WordsOfFlag(tuple(action.option_strings), meaning, _takes(action), listed))
        else:
            values = values or choices_of(action)
            takes_files = takes_files or action.metavar in ("FILE", "MODEL")
    yield WordsOfCommand(path, tuple(commands), tuple(flags), values, takes_files)


def _takes(action: argparse.Action) -> Takes:
    if action.nargs == 0:
        return Takes.NOTHING
    return {"FILE": Takes.FILE, "DIR": Takes.FOLDER}.get(str(action.metavar), Takes.WORD)


# -- bash -------------------------------------------------------------------------------------------------------------


def bash(commands: list[WordsOfCommand]) -> str:
    """Write the script for bash."""

    def offers(flag: WordsOfFlag) -> str:
        if flag.takes is Takes.WORD:
            return f'COMPREPLY=($(compgen -W "{" ".join(flag.values)}" -- "$cur")); ' if flag.values else ""
        return "_dynamo_files -f; " if flag.takes is Takes.FILE else "_dynamo_files -d; "

    words = []
    for command in commands:
        flags = " ".join(name for flag in command.flags for name in flag.names)
        first = " ".join((*(name for name, _ in command.commands), *command.values))
        files = "; files=1" if command.takes_files else ""
        words.append(f'    "{" ".join(command.path)}") flags="{flags}" first="{first}"{files} ;;')
    return f"""\
# Completion of dynamo for bash; made by: dynamo completion bash

_dynamo_files() {{
  compopt -o filenames 2>/dev/null
  local IFS=$'\\n'
  COMPREPLY=($(compgen "$1" -- "$cur"))
}}

_dynamo() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command="" flags="" first="" files="" depth=1 i
  COMPREPLY=()
  if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    [[ ${{COMP_WORDS[i]}} == -- ]] && {{ _dynamo_files -f; return; }}
    if ((i == depth)); then
      case "$command ${{COMP_WORDS[i]}}" in
        {_paths(commands)}) command="${{command:+$command }}${{COMP_WORDS[i]}}"; depth=$((i + 1)) ;;
      esac
    fi
  done
  case "$command $prev" in
{_behind(commands, offers)}
  esac
  case "$command" in
{_lines(words)}
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$cur"))
  elif [[ -n $first ]] && ((COMP_CWORD == depth)); then
    COMPREPLY=($(compgen -W "$first" -- "$cur"))
  elif [[ -n $files ]]; then
    _dynamo_files -f
  fi
}}

complete -F _dynamo dynamo
"""


def _behind(commands: list[WordsOfCommand], offers: Callable[[WordsOfFlag], str]) -> str:
    """Return what is offered behind each flag, as the cases of the command with the flag."""
    cases: dict[str, list[str]] = {}
    for command in commands:
        for flag in command.flags:
            if flag.takes is not Takes.NOTHING:
                where = cases.setdefault(offers(flag), [])
                where += [f'"{" ".join(command.path)} {name}"' for name in flag.names]
    return _lines([f"    {'|'.join(where)}) {offer}return ;;" for offer, where in cases.items()])


def _paths(commands: list[WordsOfCommand]) -> str:
    return "|".join(f'"{" ".join(c.path[:-1])} {c.path[-1]}"' for c in commands if c.path)


def _lines(lines: list[str]) -> str:
    return "\n".join(lines)


# -- zsh --------------------------------------------------------------------------------------------------------------


def zsh(commands: list[WordsOfCommand]) -> str:
    """Write the script for zsh."""

    def offers(flag: WordsOfFlag) -> str:
        if flag.takes is Takes.WORD:
            return f"compadd -- {' '.join(map(_quoted, flag.values))}; " if flag.values else ""
        return "_files; " if flag.takes is Takes.FILE else "_files -/; "

    words = []
    for command in commands:
        flags = " ".join(_described(name, flag.help) for flag in command.flags for name in flag.names)
        first = " ".join(
            [*(_described(name, what) for name, what in command.commands), *(_described(v, "") for v in command.values)]
        )
        files = "; files=1" if command.takes_files else ""
        words.append(f'    "{" ".join(command.path)}") flags=({flags}); first=({first}){files} ;;')
    return f"""\
#compdef dynamo
# Completion of dynamo for zsh; made by: dynamo completion zsh

_dynamo() {{
  local command="" files=""
  local -a flags first
  integer i depth=2
  for ((i = 2; i < CURRENT; i++)); do
    [[ ${{words[i]}} == -- ]] && {{ _files; return; }}
    if ((i == depth)); then
      case "$command ${{words[i]}}" in
        {_paths(commands)}) command="${{command:+$command }}${{words[i]}}"; ((depth = i + 1)) ;;
      esac
    fi
  done
  case "$command ${{words[CURRENT-1]}}" in
{_behind(commands, offers)}
  esac
  case "$command" in
{_lines(words)}
  esac
  if [[ ${{words[CURRENT]}} == -* ]]; then
    _describe -o flag flags
  elif (( ${{#first}} && CURRENT == depth )); then
    _describe word first
  elif [[ -n $files ]]; then
    _files
  fi
}}

if [[ ${{funcstack[1]:-}} == _dynamo ]]; then _dynamo "$@"; else compdef _dynamo dynamo; fi
"""


def _described(name: str, what: str) -> str:
    return _quoted(f"{name}:{_one_line(what)}" if what else name)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _one_line(text: str) -> str:
    """Return the first sentence of a help text on one line."""
    return re.split(r"(?<=[a-z)])[.;:] ", re.sub(r"\s+", " ", text), maxsplit=1)[0].rstrip(".")


# -- fish -------------------------------------------------------------------------------------------------------------


def fish(commands: list[WordsOfCommand]) -> str:
    """Write the script for fish."""
    lines = []
    for command in commands:
        path = " ".join(command.path)
        here = f"complete -c dynamo -n '__dynamo_at {_fish_word(path)}'"
        lines += [f"{here} -f" if not command.takes_files else f"{here} -F"]
        for name, what in (*command.commands, *((value, "") for value in command.values)):
            first = f"complete -c dynamo -n '__dynamo_first {_fish_word(path)}'"
            lines.append(f"{first} -f -a {_fish(name)}{_fish_help(what)}")
        for flag in command.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            behind = {
                Takes.NOTHING: "",
                Takes.FILE: " -r -F",
                Takes.FOLDER: " -x -a '(__fish_complete_directories)'",
                Takes.WORD: f" -x -a {_fish(' '.join(flag.values))}" if flag.values else " -x",
            }[flag.takes]
            lines.append(f"{here} {names}{behind}{_fish_help(flag.help)}")
    paths = " ".join(_fish(" ".join(command.path)) for command in commands if command.path)
    return f"""\
# Completion of dynamo for fish; made by: dynamo completion fish

function __dynamo_path -d 'The command that is being typed'
    set -l path
    for word in (commandline -opc)[2..]
        contains -- (string join ' ' -- $path $word) {paths}; or break
        set -a path $word
    end
    string join ' ' -- $path
end

function __dynamo_at -d 'Whether this is the command that is being typed'
    test (__dynamo_path | string collect -a) = "$argv"
end

function __dynamo_first -d 'Whether the first argument of this command is being typed'
    __dynamo_at $argv; and test (count (commandline -opc)) -eq (math 1 + (count (string split -n ' ' -- "$argv")))
end

{_lines(lines)}
"""


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_word(path: str) -> str:
    return f'"{path}"' if path else '""'


def _fish_help(text: str) -> str:
    return f" -d {_fish(_one_line(text))}" if text else ""


SHELLS: Final[Mapping[str, Callable[[list[WordsOfCommand]], str]]] = {"bash": bash, "zsh": zsh, "fish": fish}

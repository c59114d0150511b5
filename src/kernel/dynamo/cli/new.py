"""`dynamo new NAME`: the package of a backend that runs, with tests that pass, to be changed into yours.

With `--rust` it is a crate, else a Python package.
"""

from __future__ import annotations

import json
import keyword
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Final, Self

from dynamo.cli.installation import CHECKOUT, Installation
from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser
from dynamo.settings.flags import add_flags
from dynamo.settings.readers import folder, placeholder, switch, text
from dynamo.settings.table import read_settings, setting, settings_of

SDK: Final = "dynamo-backend-common"
SUFFIX: Final = ".tmpl"  # keeps what is not yet Python away from linters and type checkers
MAX_NAME: Final = 64

# A name that an index, a shell and a file system all take: words of letters and digits, joined by one separator.
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*([._-][A-Za-z0-9]+)*")
_RESERVED: Final = frozenset({"dynamo", "test", "tests", "main", "engine"})

_EPILOG: Final = """\
example:
  dynamo new my-backend
  dynamo new --rust my-backend

The command prints the steps that install the package and run its tests.
"""


@dataclass(frozen=True, slots=True)
class Names:
    """One name in its three spellings."""

    name: str  # my-backend: distribution and command
    module: str  # my_backend
    engine: str  # MyEngine

    @classmethod
    def of(cls, name: str) -> Self:
        """Derive module and class. Raises UsageError with what a name may be."""
        if len(name) > MAX_NAME or not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot be a package's name; use up to {MAX_NAME} letters and digits, in words joined by -, "
                "such as my-backend"
            )
        words = re.split(r"[._-]", name.lower())
        module = "_".join(words)
        if keyword.iskeyword(module) or module in _RESERVED or module in sys.stdlib_module_names:
            raise UsageError(f"{name!r} would hide the Python module {module!r}; use another name, such as my-{name}")
        stem = words[:-1] if len(words) > 1 and words[-1] in ("backend", "engine") else words
        return cls(name, module, "".join(word.capitalize() for word in stem) + "Engine")


@dataclass(frozen=True, slots=True)
class NewFlags:
    """What kind of package, and where."""

    # fmt: off
    dir: Path = setting(Path(), None, folder, "Where to put it", flag="--dir", shown="here")
    rust: bool = setting(False, None, switch, "Write a crate in Rust instead of a Python package", flag="--rust",
        negative="")
    sdk: str | None = setting(None, None, placeholder("PATH|URL", text),
        "With `--rust`: the crate `dynamo-backend-common`, a directory or a git repository", flag="--sdk")
    force: bool = setting(False, None, switch, "Overwrite the files of an earlier one", flag="--force", negative="")
    # fmt: on


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo new", description="Write a backend's package: engine, command, tests, README.", epilog=_EPILOG
    )
    parser.add_argument("name", metavar="NAME", help="of the package and its command, such as my-backend")
    add_flags(parser, (made for _, made in settings_of(NewFlags)), {})
    return parser


def main(argv: list[str]) -> int:
    """Write the package and return the exit status."""
    given = build_parser().parse_args(argv)
    options = read_settings(NewFlags, {}, vars(given))
    names = Names.of(given.name)
    if options.rust:
        package, steps = rendered_crate(names, options.sdk), _crate_steps()
    else:
        if options.sdk is not None:
            raise UsageError("--sdk is about a crate in Rust: add --rust")
        installation = Installation.find()
        package, steps = rendered(names, installation), _package_steps(names, installation)
    root: Path = options.dir / names.name
    try:
        if not options.force and root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise UsageError(f"{root} exists already; use another name, or --force to overwrite the files in it")
        for path, text in package.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            print(f"wrote {target}")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or root}: {error.strerror}") from None
    print("\nNext:")
    for step in (f"cd {shlex.quote(str(root))}", *steps):
        print(f"  {step}")
    engine = PurePosixPath("src/lib.rs") if options.rust else PurePosixPath("src", names.module, "engine.py")
    print(f"Then make {engine} yours; README.md shows where to begin.")
    return 0


def _package_steps(names: Names, installation: Installation) -> tuple[str, ...]:
    return (
        "python3 -m venv .venv",
        ". .venv/bin/activate",
        _pip_install(installation),
        "pytest",
        f"dynamo serve my-model --engine {names.module}.engine:{names.engine}",
    )


def _crate_steps() -> tuple[str, ...]:
    return (
        "cargo test",
        "cargo run --release -- --model-name my-model --discovery-backend file",
    )


def rendered(names: Names, installation: Installation) -> Mapping[PurePosixPath, str]:
    """Fill in every file of the package: its path below the root, and its text."""
    values = {
        "@@name@@": names.name,
        "@@module@@": names.module,
        "@@class@@": names.engine,
        "@@version@@": installation.version,
        "@@pip_install@@": _pip_install(installation),
    }
    return _filled("template", names, values)


def rendered_crate(names: Names, sdk: str | None) -> Mapping[PurePosixPath, str]:
    """Fill in every file of the crate; `sdk`: where dynamo-backend-common is, None for that of this checkout.

    Raises UsageError where no SDK is found, and for a name that cargo does not take.
    """
    if "." in names.name:
        raise UsageError(f"{names.name!r} cannot be the name of a crate: use - instead of the dot")
    return _filled(
        "template_rust",
        names,
        {
            "@@name@@": names.name,
            "@@module@@": names.name.replace("-", "_"),
            "@@class@@": names.engine,
            "@@sdk@@": _sdk_source(sdk),
        },
    )


def _sdk_source(sdk: str | None) -> str:
    """Return where cargo finds the SDK, as members of a dependency in TOML."""
    if sdk is not None and "://" in sdk:
        return f"git = {json.dumps(sdk)}"
    place = CHECKOUT / "rust" / SDK if sdk is None else Path(sdk).resolve()
    if not (place / "Cargo.toml").is_file():
        where = "beside this installation" if sdk is None else f"in {place}"
        raise UsageError(
            f"there is no crate {SDK} {where}; name it with --sdk: the directory rust/{SDK} of a checkout, or the URL "
            "of a git repository that has it"
        )
    return f"path = {json.dumps(str(place))}"


def _filled(folder: str, names: Names, values: Mapping[str, str]) -> dict[PurePosixPath, str]:
    found: dict[PurePosixPath, str] = {}
    for path, content in _templates(files("dynamo.cli") / folder, PurePosixPath()):
        for mark, value in values.items():
            content = content.replace(mark, value)
        parts = [names.module if part == "module" else part for part in path.parts]
        parts[-1] = ".gitignore" if parts[-1] == "gitignore" else parts[-1]
        found[PurePosixPath(*parts)] = content
    return found


def _pip_install(installation: Installation) -> str:
    """Write the one command that installs the package, its tools and the `dynamo` it needs.

    The requirement in pyproject.toml names no path, so that it holds on every machine. pip takes the candidate that the
    same command names.
    """
    return " ".join(part for part in ("pip install", installation.pip_arguments, '-e ".[dev]"') if part)


def _templates(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _templates(entry, at / entry.name)
        elif entry.name.endswith(SUFFIX):
            yield at / entry.name.removesuffix(SUFFIX), entry.read_text(encoding="utf-8")

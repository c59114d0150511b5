"""The three images: a server, a worker with an engine of a user's, a worker in Rust."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oci_image.base import Base, make_root_file_system, read_base, write_base_layer
from oci_image.containerfile import read_containerfile, settings
from oci_image.errors import CannotBuild
from oci_image.layers import Layer, LayerWriter, Owner
from oci_image.layout import ARCHITECTURES, Image, Layout, architecture, write_archive
from oci_image.python_layer import HOME, Environment
from oci_image.sbom import crates, debian_components, python_components, write_bill

__all__ = ["Build", "Labels", "build_backend", "build_rust", "build_server"]

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
UID: Final = 10001  # of deploy/Containerfile
USER: Final = "dynamo"
EXTRAS: Final = "etcd,nats,kubernetes,reference,guided"  # of deploy/Containerfile
PYTHON_PACKAGES: Final = ("python3", "ca-certificates", "libstdc++6", "tini")
RUST_PACKAGES: Final = ("ca-certificates",)
USUAL_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OURS: Final = r"dynamo|dynamo_unified-.*"


@dataclass(frozen=True)
class Labels:
    """What is said of an image."""

    version: str
    revision: str
    created: str
    source: str = ""
    licenses: str = ""

    def of(self, title: str) -> dict[str, str]:
        """Return the labels of the OCI; one that nothing is known of is left out."""
        found = {
            "title": title,
            "version": self.version,
            "revision": self.revision,
            "created": self.created,
            "source": self.source,
            "licenses": self.licenses,
        }
        return {f"org.opencontainers.image.{name}": value for name, value in found.items() if value}


@dataclass(frozen=True)
class Build:
    """Where an image is built, from which release of Debian, and where the progress is reported."""

    out: Path
    work: Path  # empty, and removed by the caller
    suite: str
    base: Path | None = None  # the tar file of a root file system, in place of mmdebstrap's
    report: Callable[[str], None] = print

    def root_file_system(self, packages: tuple[str, ...]) -> tuple[Base, Layer]:
        """Return the lowest layer. It is made once for a release and a set of packages, and then kept."""
        archive = self.base
        if archive is None:
            name = f"{self.suite}-{architecture()}-{'-'.join(sorted(packages))}.tar"
            archive = self.out / "base" / name
            if archive.exists():
                self.report(f"root file system: {archive} (remove it for newer packages)")
            else:
                self.report(f"root file system: Debian {self.suite} with {', '.join(packages)} (a few minutes) ...")
                make_root_file_system(self.suite, packages, archive)
        elif not archive.is_file():
            raise CannotBuild(f"there is no file {archive}")
        base = read_base(archive)
        self.report(f"layer 1: {len(base.packages)} packages of Debian ...")
        return base, write_base_layer(archive, base, self.work / "base.layer")

    def finish(self, name: str, image: Image, bill: bytes) -> Path:
        """Write the folder of the image, its archive and its bill of materials. Return the archive."""
        digest = Layout(self.out / name).write(image, f"{name}:{image.annotations['org.opencontainers.image.version']}")
        archive = self.out / f"{name}.oci.tar"
        write_archive(self.out / name, archive)
        (self.out / f"{name}.cdx.json").write_bytes(bill)
        size = sum(each.size for each in image.layers)
        self.report(f"{archive}: {size / 1e6:.0f} MB in {len(image.layers)} layers, {digest}")
        return archive


@dataclass
class _Layers:
    """Layers under construction, with a comment for each."""

    build: Build
    epoch: int
    layers: list[Layer] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def add(self, comment: str, write: Callable[[LayerWriter], None]) -> None:
        """Write one layer more."""
        self.build.report(f"layer {len(self.layers) + 1}: {comment} ...")
        with LayerWriter(self.build.work / f"{len(self.layers)}.layer", self.epoch) as writer:
            write(writer)
        assert writer.layer is not None
        self.append(writer.layer, comment)

    def append(self, layer: Layer, comment: str) -> None:
        """Take over a layer that is there."""
        self.layers.append(layer)
        self.comments.append(comment)


def build_server(
    build: Build, wheel: Path, labels: Labels, *, name: str = "dynamo-unified", extras: str = EXTRAS
) -> Path:
    """Build the image of every role: this package with what frontends and workers without a GPU need."""
    base, lowest = build.root_file_system(PYTHON_PACKAGES)
    packages = Environment(build.work / "packages", base, _machine())
    build.report(f"pip: {wheel.name}[{extras}] ...")
    packages.install([f"{wheel}[{extras}]" if extras else str(wheel)])
    packages.compile()
    components = debian_components(base.packages) + python_components(packages.packages())
    bill = write_bill(name, labels.version, labels.created, components)
    layers = _Layers(build, base.epoch)
    layers.append(lowest, f"Debian {build.suite}: {', '.join(PYTHON_PACKAGES)}")

    def write_requirements(writer: LayerWriter) -> None:
        packages.write_environment(writer)
        packages.write(writer, rf"(?!({OURS})$).*")

    def write_ours(writer: LayerWriter) -> None:
        packages.write(writer, OURS)
        packages.write_programs(writer)
        _write_user(writer, base)
        _write_rest(writer, name, bill)

    layers.add("what this package requires", write_requirements)
    layers.add(f"{wheel.name}, the user {USER}, the health check, the bill of materials", write_ours)
    config = settings(read_containerfile(DEPLOY / "Containerfile"))
    path = {"PATH": f"/{HOME}/bin:{USUAL_PATH}"}
    return build.finish(name, _image(config, labels.of(name), layers, path), bill)


def build_backend(build: Build, wheels: Sequence[Path], labels: Labels, *, name: str = "", command: str = "") -> Path:
    """Build a worker: wheels of a user's on top of the server's image, and the command of the first one."""
    below = Layout(build.out / "dynamo-unified").read()
    base = read_base(below.layers[0].path)
    packages = Environment(build.work / "packages", base, _machine())
    packages.install([str(each) for each in wheels], with_dependencies=False)
    packages.compile()
    commands = packages.commands_of(wheels[:1])
    if not command and len(commands) != 1:
        raise CannotBuild(
            f"{wheels[0].name} has {len(commands)} commands ({', '.join(commands) or 'none'}): name one with --command"
        )
    command = command or commands[0]
    name = name or command
    components = _components_below(build, "dynamo-unified") + python_components(packages.packages())
    bill = write_bill(name, labels.version, labels.created, components)
    layers = _Layers(build, base.epoch)
    for layer, comment in zip(below.layers, below.comments, strict=True):
        layers.append(layer, comment)

    def write(writer: LayerWriter) -> None:
        packages.write(writer)
        packages.write_programs(writer)
        _write_bill(writer, name, bill)

    layers.add(", ".join(each.name for each in wheels), write)
    own = settings(read_containerfile(DEPLOY / "Containerfile.backend"))
    own["Entrypoint"] = [*own["Entrypoint"][:-1], command]
    own["Env"] = [*below.config["Env"], *own.get("Env", [])]
    return build.finish(name, _image({**below.config, **own}, labels.of(name), layers, {}), bill)


def build_rust(build: Build, binary: Path, labels: Labels, *, name: str = "", lock: Path | None = None) -> Path:
    """Build a worker in Rust: one program, and no Python."""
    name = name or binary.name
    base, lowest = build.root_file_system(RUST_PACKAGES)
    content = binary.read_bytes()
    needed = max(
        (tuple(map(int, each.split(b"."))) for each in re.findall(rb"\0GLIBC_(\d+\.\d+)(?=\0)", content)),
        default=(2, 0),
    )
    if needed > base.glibc:
        both = [".".join(map(str, each)) for each in (needed, base.glibc)]
        raise CannotBuild(
            f"{binary} needs a C library of version {both[0]}, and the root file system has {both[1]}: build it on that release of Debian, or take a newer one with --suite"
        )
    components = debian_components(base.packages) + (crates(lock) if lock is not None else [])
    bill = write_bill(name, labels.version, labels.created, components)
    layers = _Layers(build, base.epoch)
    layers.append(lowest, f"Debian {build.suite}: {', '.join(RUST_PACKAGES)}")

    def write(writer: LayerWriter) -> None:
        writer.add_bytes("usr/local/bin/backend", content, mode=0o755)
        _write_user(writer, base)
        _write_rest(writer, name, bill)

    layers.add(binary.name, write)
    config = settings(read_containerfile(DEPLOY / "Containerfile.rust"))
    return build.finish(name, _image(config, labels.of(name), layers, {"PATH": USUAL_PATH}), bill)


def _image(
    config: Mapping[str, Any], labels: Mapping[str, str], layers: _Layers, variables: Mapping[str, str]
) -> Image:
    first = [f"{name}={value}" for name, value in variables.items()]
    # A number: an orchestrator that refuses root cannot know which number a name has.
    full = {**config, "Env": [*first, *config.get("Env", [])], "User": f"{UID}:{UID}", "Labels": dict(labels)}
    return Image(full, labels["org.opencontainers.image.created"], layers.layers, layers.comments, labels)


def _write_user(writer: LayerWriter, base: Base) -> None:
    writer.add_bytes("etc/passwd", f"{base.users}{USER}:x:{UID}:{UID}::/home/{USER}:/bin/sh\n".encode())
    writer.add_bytes("etc/group", f"{base.groups}{USER}:x:{UID}:\n".encode())
    writer.add_folder(f"home/{USER}", owner=Owner(UID, UID))


def _write_rest(writer: LayerWriter, name: str, bill: bytes) -> None:
    writer.add_bytes("usr/local/bin/dynamo-ready", (DEPLOY / "ready.sh").read_bytes(), mode=0o755)
    _write_bill(writer, name, bill)


def _write_bill(writer: LayerWriter, name: str, bill: bytes) -> None:
    writer.add_bytes(f"usr/share/sbom/{name}.cdx.json", bill)


def _components_below(build: Build, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((build.out / f"{name}.cdx.json").read_bytes())["components"]
    return found


def _machine() -> str:
    return next(machine for machine, name in ARCHITECTURES.items() if name == architecture())

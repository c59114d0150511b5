"""`make image`: build a container image from Debian's packages and wheels, without a container engine or a registry.

    make image                                            the server, from the wheel of this tree
    make image KIND=backend WHEEL=path/to/my_backend.whl  a worker with an engine of yours, on top of it
    make image KIND=rust BINARY=path/to/my-backend        a worker in Rust, without Python

The results are dist/image/NAME (an OCI image layout), NAME.oci.tar (for `podman load`, `docker load` and skopeo) and
NAME.cdx.json (what is inside, as CycloneDX; the image has it below /usr/share/sbom). The settings of the images are those of
deploy/Containerfile*. Needed are mmdebstrap (Debian's package; no root where it may use user namespaces) and pip.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import distribution

from oci_image.errors import CannotBuild
from oci_image.kinds import EXTRAS, Build, Labels, build_backend, build_rust, build_server

__all__ = ["main"]

OUT: Final = distribution.ROOT / "dist" / "image"


def main(argv: Sequence[str] | None = None) -> int:
    """Build one image. Return 0, or 2 with a sentence about what to change."""
    options = _parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="work-", dir=options.out) as work:
            build = Build(options.out, Path(work), options.suite, options.base, _report)
            _build(options, build)
    except (CannotBuild, distribution.CannotPack) as error:
        print(f"image: {error}", file=sys.stderr)
        return 2
    return 0


def _build(options: argparse.Namespace, build: Build) -> None:
    for path in [*options.wheel, *filter(None, [options.binary, options.lock])]:
        if not path.is_file():
            raise CannotBuild(f"there is no file {path}")
    if options.kind == "server":
        wheel = options.wheel[0] if options.wheel else distribution.build(distribution.ROOT / "dist")[1]
        build_server(
            build,
            wheel,
            _labels(options, _version_of(wheel)),
            name=options.name or "dynamo-unified",
            extras=options.extras,
        )
    elif options.kind == "backend":
        if not options.wheel:
            raise CannotBuild("a backend is made of a wheel: make image KIND=backend WHEEL=path/to/NAME.whl")
        labels = _labels(options, _version_of(options.wheel[0]))
        build_backend(build, options.wheel, labels, name=options.name, command=options.command)
    else:
        if options.binary is None:
            raise CannotBuild(
                "a worker in Rust is made of a program: `cd rust && cargo build --release --package sample-backend`, "
                "then make image KIND=rust BINARY=rust/target/release/sample-backend"
            )
        build_rust(build, options.binary, _labels(options, ""), name=options.name, lock=options.lock)


def _labels(options: argparse.Namespace, version: str) -> Labels:
    """Return the labels: the options', and for what is of this tree also its commit, its remote and its licence."""
    revision, time = distribution.revision()
    is_ours = options.kind == "server" or (
        options.kind == "rust" and options.binary.resolve().is_relative_to(distribution.ROOT)
    )
    source = options.source or (_origin() if is_ours else "")
    if not source:
        _report("no label for the source: --source URL gives one")
    created = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or time), UTC)
    return Labels(
        version=options.version or version or "0.0.0",
        revision=options.revision or (revision if is_ours else ""),
        created=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        source=source,
        licenses="Apache-2.0" if is_ours else "",
    )


def _version_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        found = re.search(r"^Version: (.+)$", archive.read(name).decode(), re.MULTILINE)
    if found is None:
        raise CannotBuild(f"{wheel} names no version")
    return found[1]


def _origin() -> str:
    """Return the URL of the remote, without a name or password in it; empty where it is a path of this machine."""
    argv = ["git", "-C", str(distribution.ROOT), "config", "remote.origin.url"]
    found = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    parts = urlsplit(found)
    return parts._replace(netloc=parts.hostname or "").geturl() if parts.scheme in {"https", "http"} else ""


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    first, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "python -m oci_image", description=first, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("kind", choices=("server", "backend", "rust"))
    add(
        "--wheel",
        type=Path,
        nargs="*",
        default=[],
        help="server: this package's (else it is built); backend: yours and those it needs",
    )
    add("--command", default="", help="backend: the command of the image, where the wheel has several")
    add("--binary", type=Path, help="rust: the program")
    add("--lock", type=Path, help="rust: its Cargo.lock, for the bill of materials")
    add("--extras", default=EXTRAS, help="server: the extras of this package (%(default)s)")
    add("--suite", default="bookworm", help="the release of Debian (%(default)s)")
    add("--base", type=Path, help="the tar file of a root file system, in place of one by mmdebstrap")
    add("--name", default="", help="the name of the image (dynamo-unified, the command, the program)")
    add("--version", default="", help="the label and the tag (that of the wheel)")
    add("--revision", default="", help="the label (the commit of this tree, for what is of it)")
    add("--source", default="", help="the label: the URL of the source (the remote of this tree, for what is of it)")
    add("--out", type=Path, default=OUT, help="the folder of the results (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The folder of an image as the OCI image layout 1.0 has it: `oci-layout`, `index.json`, and blobs by their SHA-256."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oci_image.errors import CannotBuild
from oci_image.layers import Layer

__all__ = ["ARCHITECTURES", "Image", "Layout", "architecture", "write_archive"]

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
TAR_GZIP: Final = "application/vnd.oci.image.layer.v1.tar+gzip"

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
"""The names of Debian and of images, which are the same, by the machine's own."""


def architecture() -> str:
    """Return the architecture of this machine. Raises CannotBuild for one that is not known here."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise CannotBuild(f"the architecture {machine} is not one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[machine]


@dataclass(frozen=True)
class Image:
    """An image: its settings as the `config` of the specification, what is said of it, and its layers from the bottom."""

    config: Mapping[str, Any]
    created: str
    layers: Sequence[Layer]
    comments: Sequence[str]  # of each layer: what made it
    annotations: Mapping[str, str] = field(default_factory=dict)


class Layout:
    """One image in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blobs = folder / "blobs" / "sha256"

    def write(self, image: Image, name: str) -> str:
        """Write the image in place of what is there. Return the digest of its manifest."""
        fresh = Layout(self._folder.with_name(f"{self._folder.name}.new"))
        shutil.rmtree(fresh._folder, ignore_errors=True)
        fresh._blobs.mkdir(parents=True)
        for layer in image.layers:
            shutil.copyfile(layer.path, fresh._blobs / layer.digest.partition(":")[2])
        config = fresh._put(_config_of(image), CONFIG)
        layers = [{"mediaType": TAR_GZIP, "digest": each.digest, "size": each.size} for each in image.layers]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
        top = fresh._put({**manifest, "annotations": dict(image.annotations)}, MANIFEST)
        platform_of = {"architecture": architecture(), "os": "linux"}
        named = {**top, "platform": platform_of, "annotations": {"org.opencontainers.image.ref.name": name}}
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}
        (fresh._folder / "index.json").write_bytes(_json(index))
        (fresh._folder / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
        shutil.rmtree(self._folder, ignore_errors=True)
        fresh._folder.rename(self._folder)
        return str(top["digest"])

    def read(self) -> Image:
        """Return the image that is there. Raises CannotBuild where there is none, or where a blob is not what its name says."""
        try:
            index = json.loads((self._folder / "index.json").read_bytes())
        except FileNotFoundError as error:
            raise CannotBuild(f"{self._folder} holds no image; build it first") from error
        manifest = json.loads(self._blob(index["manifests"][0]["digest"]).read_bytes())
        config = json.loads(self._blob(manifest["config"]["digest"]).read_bytes())
        blobs = [each["digest"] for each in manifest["layers"]]
        layers = [
            Layer((path := self._blob(digest)), digest, diff_id, path.stat().st_size)
            for digest, diff_id in zip(blobs, config["rootfs"]["diff_ids"], strict=True)
        ]
        comments = [each["created_by"] for each in config["history"]]
        return Image(config["config"], config["created"], layers, comments, manifest["annotations"])

    def _put(self, document: Mapping[str, Any], kind: str) -> dict[str, Any]:
        content = _json(document)
        digest = hashlib.sha256(content).hexdigest()
        (self._blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    def _blob(self, digest: str) -> Path:
        path = self._blobs / digest.partition(":")[2]
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if f"sha256:{found}" != digest:
            raise CannotBuild(f"{path} is damaged: its digest is {found}; build the image again")
        return path


def write_archive(folder: Path, target: Path) -> None:
    """Write the folder of an image as one tar file, for `podman load`, `docker load` and `skopeo`. Equal folders give equal files."""
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                archive.addfile(member, file)


def _config_of(image: Image) -> dict[str, Any]:
    return {
        "created": image.created,
        "architecture": architecture(),
        "os": "linux",
        "config": dict(image.config),
        "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in image.layers]},
        "history": [{"created": image.created, "created_by": comment} for comment in image.comments],
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"

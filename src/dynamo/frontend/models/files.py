"""Bring the files a model card names onto this machine, whole and verified, and load them.

A file is taken from where it lies when the card names a local path, else downloaded into a cache that is keyed by content:
`<cache>/<slug>/<fingerprint>/<file name>`. Nothing is used whose BLAKE3 does not match the card. Everything here blocks and
runs in an executor.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from dynamo.errors import CannotConnect, DynamoException, InvalidArgument
from dynamo.protocol.records import FileRef, ModelCard

__all__ = ["ChecksumMismatch", "ModelFiles", "Sources"]

FILE_NAMES: Final = {
    "hf_config_json": "config.json",
    "hf_tokenizer_json": "tokenizer.json",
    "hf_tokenizer_config_json": "tokenizer_config.json",
    "hf_chat_template_jinja": "chat_template.jinja",
    "hf_chat_template_json": "chat_template.json",
    "hf_generation_config_json": "generation_config.json",
    "tik_token_model": "tiktoken.model",
}

DOWNLOAD_TIMEOUT_SECONDS: Final = 30.0  # of silence, not of the whole file
MAX_FILE_BYTES: Final = 512 * 1024 * 1024  # the largest tokenizer known is 40 MB; a card must not fill the disk
_BLOCK_BYTES: Final = 1024 * 1024


class ChecksumMismatch(DynamoException):
    """A file is not the one the card was made from."""

    def __init__(self, where: str, expected: str, found: str) -> None:
        super().__init__(f"{where} hashes to {found}, the model card says {expected}; the file changed or was cut")
        self.where, self.expected, self.found = where, expected, found


class Sources:
    """What is needed to load a model: a directory of its files (None: a name only) and a template that overrides it."""

    __slots__ = ("custom_template", "directory")

    def __init__(self, directory: Path | None, custom_template: str | None) -> None:
        self.directory, self.custom_template = directory, custom_template


class ModelFiles:
    """The cache of one process."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        # Model files come from inside the cluster; a proxy for the outside world must not see these requests.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def collect(self, card: ModelCard) -> Sources:
        """The card's files on this machine.

        Raises CannotConnect when one cannot be had now (trying again may help), ChecksumMismatch when it is another
        file, InvalidArgument when the card names a place that this version cannot read.
        """
        override = card.template_file()
        template_ref = override[1] if override else None
        files = [(kind, ref) for kind, ref in card.files() if ref != template_ref and kind in FILE_NAMES]
        home = self._cache_dir / (card.slug or "model") / card.checksum()
        custom = None
        if override is not None:
            kind, template_ref = override
            found = self._obtain(template_ref, home / f"override_{FILE_NAMES.get(kind, 'chat_template.jinja')}")
            custom = _template_text(kind, found)
        if not files:
            return Sources(None, custom)
        together = _common_directory(files)
        if together is not None:
            for _, ref in files:
                _verify(_local_path(ref.path) or Path(ref.path), ref)
            return Sources(together, custom)
        for kind, ref in files:
            wanted = home / FILE_NAMES[kind]
            found = self._obtain(ref, wanted)
            if found != wanted:
                _link(found, wanted)
        return Sources(home, custom)

    def _obtain(self, ref: FileRef, cached: Path) -> Path:
        local = _local_path(ref.path)
        if local is not None and local.is_file():
            _verify(local, ref)
            return local
        if cached.is_file() and _matches(cached, ref):
            return cached
        if local is not None:
            raise CannotConnect(
                f"model file {local} is not on this machine; let the worker serve its files "
                "(DYN_SYSTEM_PORT and DYN_SELF_HOST_METADATA=1) or share the directory"
            )
        if not ref.path.startswith(("http://", "https://")):
            raise InvalidArgument(f"model file {ref.path!r}: this version reads local paths, file: and http: URIs")
        self._download(ref, cached)
        return cached

    def _download(self, ref: FileRef, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        limit = min(ref.size, MAX_FILE_BYTES) if ref.size else MAX_FILE_BYTES
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".tmp_")
        digest, received = blake3(), 0
        try:
            with (
                os.fdopen(handle, "wb") as out,
                self._opener.open(ref.path, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer,
            ):
                while block := answer.read(_BLOCK_BYTES):
                    received += len(block)
                    if received > limit:
                        raise InvalidArgument(f"model file {ref.path} is longer than the {limit} bytes expected")
                    digest.update(block)
                    out.write(block)
            _check(ref, digest.hexdigest(), ref.path)
            os.replace(name, target)  # complete or absent, also when two frontends download at once
        except (urllib.error.URLError, OSError) as error:
            raise CannotConnect(f"model file {ref.path} cannot be downloaded: {error}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def _template_text(kind: str, path: Path) -> str:
    """The template inside a file of one of the two kinds; a JSON one may hold several by name."""
    text = path.read_text(encoding="utf-8")
    if kind != "hf_chat_template_json":
        return text
    try:
        found = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"chat template {path} is no JSON object with `chat_template`") from error
    if isinstance(found, list):  # [{"name", "template"}]: the plain one is called default
        found = next((item.get("template") for item in found if item.get("name") == "default"), None)
    if not isinstance(found, str):
        raise InvalidArgument(f"chat template {path} holds no template named `default`")
    return found


def _local_path(path: str) -> Path | None:
    """The path on this machine, or None for a URI of another kind."""
    if path.startswith("file:"):
        return Path(unquote(urlsplit(path).path))
    if "://" in path:
        return None
    return Path(path).expanduser()


def _common_directory(files: list[tuple[str, FileRef]]) -> Path | None:
    """The directory in which all files already lie under the names a loader expects, or None."""
    found: set[Path] = set()
    for kind, ref in files:
        path = _local_path(ref.path)
        if path is None or path.name != FILE_NAMES[kind] or not path.is_file():
            return None
        found.add(path.parent)
    return found.pop() if len(found) == 1 else None


def _verify(path: Path, ref: FileRef) -> None:
    _check(ref, _hash(path), str(path))


def _matches(path: Path, ref: FileRef) -> bool:
    return ref.checksum in ("", f"blake3:{_hash(path)}")


def _check(ref: FileRef, digest: str, where: str) -> None:
    if ref.checksum and ref.checksum != f"blake3:{digest}":
        raise ChecksumMismatch(where, ref.checksum, f"blake3:{digest}")


def _hash(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as source:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _link(source: Path, target: Path) -> None:
    """Make `target` a name of `source`; another process doing the same at once is fine."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".tmp_{os.getpid()}_{target.name}")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(source.resolve())
    os.replace(fresh, target)

"""Bring the files a model card names onto this machine, whole and verified, and load them.

A file is taken from where it lies when the card names a local path, else downloaded into a cache that is keyed by content:
`<cache>/<slug>/<fingerprint>/<file name>`. Nothing is used whose BLAKE3 does not match the card, so a card reveals no file
whose content its writer does not know. Where files may come from is `file_policy`'s. Everything but
`TextModelLoader.load` blocks and runs in an executor.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from time import thread_time
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from dynamo.errors import CannotConnect, DynamoException, InvalidArgument
from dynamo.frontend.base.offload import Offload, ThreadOffload, load_aside
from dynamo.frontend.models.file_policy import FilePolicy, check_url, path_part
from dynamo.frontend.models.settings import ModelSettings
from dynamo.protocol.records import IMAGE_PROCESSOR, FileRef, ModelCard, ModelRuntimeConfig
from dynamo.runtime.base.addresses import detect_host
from dynamo.text.model import TextModel, load_text_model, templates_by_name
from dynamo.text.quick_encoder import BACKENDS, TokenizerChoice
from dynamo.text.template_budget import NO_CLOCK

FILE_NAMES: Final = {
    "hf_config_json": "config.json",
    "hf_tokenizer_json": "tokenizer.json",
    "hf_tokenizer_config_json": "tokenizer_config.json",
    "hf_chat_template_jinja": "chat_template.jinja",
    "hf_chat_template_json": "chat_template.json",
    "hf_generation_config_json": "generation_config.json",
    "tik_token_model": "tiktoken.model",
}
SILENCE_SECONDS: Final = 30.0  # of a worker in the middle of a file; `FilePolicy.seconds` bounds the whole
_BLOCK_BYTES: Final = 1024 * 1024


class TextModelLoader:
    """Loads in threads of its own: whatever a card names must not keep prompts waiting for a thread."""

    def __init__(self, settings: ModelSettings, offload: Offload | None, *, now: Callable[[], datetime]) -> None:
        """`offload`: in place of threads. `now` is the clock that chat templates may print."""
        self._settings = settings
        self._now = now
        # CPU time of the rendering thread, so that a busy machine refuses nothing; none under virtual time.
        self._template_clock = thread_time if offload is None else NO_CLOCK
        self._offload: Offload = ThreadOffload(settings.concurrent_model_loads) if offload is None else offload
        self._aside = load_aside if offload is None else None
        self._files = ModelFiles(settings.model_cache_dir, settings.model_files)

    async def load(self, card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        """Return the text model of a card, with the files that `worker_hosts` may serve."""
        return await self._offload(lambda: self._load(card, worker_hosts))

    def close(self) -> None:
        """Let the threads end."""
        self._offload.close()

    def _load(self, card: ModelCard, worker_hosts: frozenset[str]) -> TextModel:
        sources = self._files.collect(card, worker_hosts)
        template, named = sources.custom_template, sources.named_templates
        if self._settings.custom_jinja_template is not None:
            with open(self._settings.custom_jinja_template, encoding="utf-8") as file:
                template, named = file.read(), {}
        processor = card.runtime_config.runtime_data.get(IMAGE_PROCESSOR)
        return load_text_model(
            sources.directory,
            custom_template=template,
            named_templates=named,
            now=self._now,
            template_budget=self._settings.template_budget,
            template_clock=self._template_clock,
            tokenizer_cache_bytes=self._settings.tokenizer_cache_bytes,
            tokenizer_choice=tokenizer_choice(self._settings, card.runtime_config, self._aside),
            image_processor=processor if isinstance(processor, Mapping) else None,
        )


def tokenizer_choice(
    settings: ModelSettings, config: ModelRuntimeConfig, aside: Callable[[Callable[[], None]], None] | None = None
) -> TokenizerChoice:
    """Return what is set here, else what the worker's card demands, where that is built. `aside` starts a thread, if any may start."""
    if settings.tokenizer != "auto" or config.tokenizer_backend not in BACKENDS:
        return TokenizerChoice(settings.tokenizer, settings.tokenizer_fallback, aside)
    may_fall_back = settings.tokenizer_fallback and config.tokenizer_fallback_enabled is not False
    return TokenizerChoice(config.tokenizer_backend, may_fall_back, aside)


class ChecksumMismatch(DynamoException):
    """A file is not the one the card was made from."""

    def __init__(self, where: str, expected: str, found: str) -> None:
        # Without `found`: clients read this in `/ready`, and the hash of a short file gives its content away.
        super().__init__(f"{where} hashes to something else than the {expected} of its card; it changed or was cut")
        self.where, self.expected, self.found = where, expected, found


class Sources(NamedTuple):
    """What is needed to load a model."""

    directory: Path | None  # of its files; None: a name only
    custom_template: str | None = None  # instead of the directory's
    named_templates: Mapping[str, str] = {}  # beside it


class ModelFiles:
    """The cache of one process."""

    def __init__(self, cache_dir: Path, policy: FilePolicy | None = None) -> None:
        self._cache_dir, self._policy = cache_dir, policy or FilePolicy()

    def collect(self, card: ModelCard, worker_hosts: Collection[str] = ()) -> Sources:
        """Fetch the card's files onto this machine. `worker_hosts`: the hosts that the card's workers report.

        Raises CannotConnect when a file cannot be had now (trying again may help), ChecksumMismatch when a file differs
        from the card's, InvalidArgument when the card names a place that this frontend does not read.
        """
        fetch = _Fetch(self._policy, _with_own_address(worker_hosts))
        override = card.template_file()
        template_ref = override[1] if override else None
        files = [(kind, ref) for kind, ref in card.files() if ref != template_ref and kind in FILE_NAMES]
        # Both parts are safe: the slug is a stranger's text, the checksum our own hash.
        home = self._cache_dir / path_part(card.slug or "model") / card.checksum()
        custom: dict[str, str] = {}
        if override is not None:
            kind, template_ref = override
            found = fetch.obtain(template_ref, home / f"override_{FILE_NAMES.get(kind, 'chat_template.jinja')}")
            custom = _templates_in(kind, found)
        default = custom.pop("default", None)
        named = custom | {
            name: fetch.obtain(ref, home / "additional_chat_templates" / path_part(name)).read_text(encoding="utf-8")
            for name, ref in card.named_templates().items()
        }
        if not files:
            return Sources(None, default, named)
        together = _common_directory(files)
        if together is not None:
            for kind, ref in files:
                fetch.obtain(ref, home / FILE_NAMES[kind])
            return Sources(together, default, named)
        for kind, ref in files:
            wanted = home / FILE_NAMES[kind]
            found = fetch.obtain(ref, wanted)
            if found != wanted:
                _link(found, wanted)
        return Sources(home, default, named)


class _Fetch:
    """Gets the files of one card, within one budget of bytes and time."""

    def __init__(self, policy: FilePolicy, worker_hosts: frozenset[str]) -> None:
        self._policy, self._worker_hosts = policy, worker_hosts
        self._left_bytes = policy.card_bytes
        self._deadline = time.monotonic() + policy.seconds

    def obtain(self, ref: FileRef, cached: Path) -> Path:
        """Return where the file is; `cached` where it had to be fetched. Raises as `ModelFiles.collect`."""
        local = _local_path(ref.path)
        scheme = "file" if local is not None else ref.path.partition(":")[0].lower()
        if scheme not in ("file", "http", "https"):
            raise InvalidArgument(f"model file {ref.path!r}: this version reads local paths, file: and http: URIs")
        if scheme not in self._policy.schemes:
            raise InvalidArgument(f"model file {ref.path[:200]!r}: {scheme} is not among DYN_MODEL_FILE_SCHEMES")
        if not ref.checksum.startswith("blake3:"):
            raise InvalidArgument(f"model file {ref.path[:200]!r} has no blake3 checksum in the card")
        if local is not None and local.is_file():
            self._check(ref, self._hash(local), str(local))
            return local
        if cached.is_file() and ref.checksum == f"blake3:{self._hash(cached)}":
            return cached
        if local is not None:
            raise CannotConnect(
                f"model file {local} is not on this machine; let the worker serve its files "
                "(DYN_SYSTEM_PORT and DYN_SELF_HOST_METADATA=1) or share the directory"
            )
        check_url(ref.path, self._policy, self._worker_hosts, _addresses_of)
        self._download(ref, cached)
        return cached

    def _download(self, ref: FileRef, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".tmp_")
        digest, received = blake3(), 0
        limit = min(ref.size or self._policy.file_bytes, self._policy.file_bytes)
        try:
            with os.fdopen(handle, "wb") as out:
                for block in self._blocks(ref):
                    received += len(block)
                    if received > limit:
                        raise InvalidArgument(
                            f"model file {ref.path[:200]} is longer than the {limit} bytes expected "
                            "(its size in the card, at most DYN_MODEL_FILE_LIMIT_MB)"
                        )
                    self._spend(len(block), ref)
                    digest.update(block)
                    out.write(block)
            self._check(ref, digest.hexdigest(), ref.path)
            os.replace(name, target)  # complete or absent, also when two frontends download at once
        except (http.client.HTTPException, OSError) as error:
            raise CannotConnect(f"model file {ref.path[:200]} cannot be downloaded: {error}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def _blocks(self, ref: FileRef) -> Iterator[bytes]:
        """Yield the answer's body. No redirect is followed and no proxy used: model files come from inside the cluster."""
        url = urlsplit(ref.path)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._too_slow(ref)
        kind = http.client.HTTPSConnection if url.scheme.lower() == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=min(SILENCE_SECONDS, left))
        # A worker that sends a byte now and then is never silent: only this ends it in time, headers included.
        timer = threading.Timer(left, _cut, (connection,))
        timer.daemon = True
        try:
            connection.connect()
            timer.start()
            connection.request("GET", (url.path or "/") + (f"?{url.query}" if url.query else ""))
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                redirect = "; redirects are not followed" if 300 <= answer.status < 400 else ""
                raise CannotConnect(f"model file {ref.path[:200]} cannot be downloaded: {answer.status}{redirect}")
            while block := answer.read1(_BLOCK_BYTES):
                yield block
            if time.monotonic() >= self._deadline:  # a connection that was cut is like one that ended
                raise self._too_slow(ref)
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
        finally:
            timer.cancel()
            connection.close()

    def _hash(self, path: Path) -> str:
        """Hash a file (BLAKE3), reading no more than its declared size. Raises InvalidArgument, CannotConnect."""
        digest = blake3()
        try:
            with path.open("rb") as source:
                facts = os.fstat(source.fileno())
                if not stat.S_ISREG(facts.st_mode):
                    raise InvalidArgument(f"model file {path} is not a regular file")
                left = facts.st_size  # files of /proc report 0, and some block their reader for ever
                if left > self._policy.file_bytes:
                    raise InvalidArgument(
                        f"model file {path} has {left} bytes, at most {self._policy.file_bytes} (DYN_MODEL_FILE_LIMIT_MB)"
                    )
                while left > 0 and (block := source.read(min(left, _BLOCK_BYTES))):
                    left -= len(block)
                    digest.update(block)
        except OSError as error:
            raise CannotConnect(f"model file {path} cannot be read: {error}") from error
        return digest.hexdigest()

    def _spend(self, count: int, ref: FileRef) -> None:
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise InvalidArgument(
                f"the files of one model card have more than {self._policy.card_bytes} bytes (DYN_MODEL_CARD_LIMIT_MB), "
                f"with {ref.path[:200]}"
            )
        if time.monotonic() >= self._deadline:
            raise self._too_slow(ref)

    def _too_slow(self, ref: FileRef) -> CannotConnect:
        return CannotConnect(
            f"model file {ref.path[:200]} did not arrive within {self._policy.seconds:g} s (DYN_MODEL_FILE_TIMEOUT_SECS)"
        )

    def _check(self, ref: FileRef, digest: str, where: str) -> None:
        if ref.checksum != f"blake3:{digest}":
            raise ChecksumMismatch(where, ref.checksum, f"blake3:{digest}")


def _cut(connection: http.client.HTTPConnection) -> None:
    """End a connection under the thread that reads it."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _addresses_of(host: str) -> frozenset[str]:
    """Return the addresses of a host; none where its name is not known."""
    try:
        return frozenset(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return frozenset()


def _with_own_address(hosts: Collection[str]) -> frozenset[str]:
    """Add this machine's address where a worker advertises loopback: its status server may go by that one."""
    on_loopback = any(host == "localhost" or host == "::1" or host.startswith("127.") for host in hosts)
    return frozenset({*hosts, detect_host()} if on_loopback else hosts)


def _templates_in(kind: str, path: Path) -> dict[str, str]:
    """Read the template of a file of one of the two kinds; a JSON file may hold several by name."""
    text = path.read_text(encoding="utf-8")
    if kind != "hf_chat_template_json":
        return {"default": text}
    try:
        found = templates_by_name(json.loads(text)["chat_template"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"chat template {path} is no JSON object with `chat_template`") from error
    if "default" not in found:
        raise InvalidArgument(f"chat template {path} holds no template named `default`")
    return found


def _local_path(path: str) -> Path | None:
    """Return the path on this machine, or None for a URI of another kind."""
    if path.startswith("file:"):
        return Path(unquote(urlsplit(path).path))
    if "://" in path:
        return None
    return Path(path).expanduser()


def _common_directory(files: list[tuple[str, FileRef]]) -> Path | None:
    """Return the directory in which all files already lie under the names a loader expects, or None."""
    found: set[Path] = set()
    for kind, ref in files:
        path = _local_path(ref.path)
        if path is None or path.name != FILE_NAMES[kind] or not path.is_file():
            return None
        found.add(path.parent)
    return found.pop() if len(found) == 1 else None


def _link(source: Path, target: Path) -> None:
    """Make `target` a name of `source`; another process doing the same at once is fine."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".tmp_{os.getpid()}_{target.name}")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(source.resolve())
    os.replace(fresh, target)

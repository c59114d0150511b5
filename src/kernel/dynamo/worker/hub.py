"""Fetching a model by its hub name, only on request: a name must not leave the machine by accident."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.settings.foreign import HUB_CACHE, HUB_HOME, HUB_OFFLINE
from dynamo.worker.settings import ALLOW_DOWNLOAD

logger = logging.getLogger(__name__)

HUB_PREFIX: Final = "hub:"
"""Before a model's name: it is one of the hub, and may be fetched."""

HUB_ANSWER_SECONDS: Final = 5.0
"""How long the hub may take to answer whether it has a name; a download that has begun is not limited. A resolver
without network can block for half a minute, and a worker should not start that late."""

WEIGHT_PATTERNS: Final = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot", "*.ckpt", "*.tflite",
)  # fmt: skip

# Forms of tokenizers that are not read: what converts them, and how. `tokenizer.model` is a model of sentencepiece.
_CONVERSIONS: Final = {
    "tekken.json": (
        "mistral-common",
        "from transformers.integrations.mistral import convert_tekken_tokenizer as read; read({file!r})",
    ),
    "tokenizer.model": (
        "sentencepiece protobuf",
        "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({folder!r})",
    ),
}

T = TypeVar("T")


def check_tokenizer_form(directory: Path) -> None:
    """Raise InvalidArgument for a folder whose tokenizer has a form that is not read; it has the command that converts it."""
    for name, (packages, code) in _CONVERSIONS.items():
        if (file := directory / name).is_file():
            read, target = code.format(file=str(file), folder=str(directory)), str(directory / "tokenizer.json")
            raise InvalidArgument(
                f"model directory {str(directory)!r} has its tokenizer in {name} alone, which is not read here; write its "
                f"tokenizer.json once: pip install transformers {packages} && "
                f'python -c "{read}.backend_tokenizer.save({target!r})"'
            )


def check_tokenizer_of(name: str) -> None:
    """Raise InvalidArgument for a model whose tokenizer is here, in a form that is not read. To be called before its engine starts."""
    directory = local_path(name) or cached_copy(name.removeprefix(HUB_PREFIX))
    if directory is not None and readable_tokenizer(directory) is None:
        check_tokenizer_form(directory)


def readable_tokenizer(directory: Path) -> tuple[str, Path] | None:
    """Return the kind and the path of the tokenizer that is read; None: there is none."""
    kinds = {directory / "tokenizer.json": "hf_tokenizer_json", directory / "tiktoken.model": "tik_token_model"}
    kinds |= dict.fromkeys(sorted(directory.glob("*.tiktoken")), "tik_token_model")
    return next(((kind, path) for path, kind in kinds.items() if path.is_file()), None)


def served_name(model: str) -> str:
    """Return what a model is called that has no given name: a directory by its own name, one of the hub without `hub:`."""
    here = Path(model).expanduser()
    return here.resolve().name if here.is_dir() else model.removeprefix(HUB_PREFIX)


async def fetch_model(remote_name: str, ignore_weights: bool = False) -> str:
    """Return the local directory of a model: `remote_name` itself if it is one, else the hub's copy.

    A copy in the local cache is used without any request. The hub is only contacted for `hub:NAME`, or where
    DYN_ALLOW_DOWNLOAD is set. Raises CannotConnect when it was not to be contacted, does not answer, or does not have the name.
    """
    name = remote_name.removeprefix(HUB_PREFIX)
    if name == remote_name and (here := local_path(name)) is not None:
        return str(here)
    if name == remote_name and not ALLOW_DOWNLOAD.value(os.environ):
        if (found := cached_copy(name)) is not None:
            return str(found)
        raise CannotConnect(
            f"fetch {name!r}: not in the local cache, and names are looked up on a hub only on request; write {HUB_PREFIX}{name}, or set "
            "DYN_ALLOW_DOWNLOAD=1"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise CannotConnect(f"fetch {name!r}: the package huggingface_hub is not installed") from error
    ignored = list(WEIGHT_PATTERNS) if ignore_weights else None

    def cached() -> str:
        found = huggingface_hub.snapshot_download(name, ignore_patterns=ignored, local_files_only=True)
        if not (Path(found) / "config.json").exists():  # an earlier download took something else
            raise FileNotFoundError(f"{found} has no config.json")
        return str(found)

    def known() -> None:
        huggingface_hub.HfApi().model_info(name, timeout=HUB_ANSWER_SECONDS)

    def download() -> str:
        return str(huggingface_hub.snapshot_download(name, ignore_patterns=ignored))

    try:
        return await _in_thread(cached)
    except Exception as error:  # not cached, in one of several ways; the hub's answer is what counts
        logger.debug("model %r is not in the local cache: %s", name, error)
    if HUB_OFFLINE.value(os.environ):
        raise CannotConnect(f"fetch {name!r}: not in the local cache, and HF_HUB_OFFLINE is set")
    try:
        async with asyncio.timeout(HUB_ANSWER_SECONDS):
            await _in_thread(known)
        logger.info("Fetching model %s from the hub", name)
        return await _in_thread(download)
    except TimeoutError as error:
        raise CannotConnect(f"fetch {name!r}: the model hub did not answer in {HUB_ANSWER_SECONDS:g} s") from error
    except Exception as error:  # the hub client raises its transport's errors as they are
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CannotConnect(f"fetch {name!r}: {reason}") from error


def local_path(name: str) -> Path | None:
    """Return the existing file or directory that `name` is (`~` expanded), or None."""
    path = Path(name).expanduser()
    return path if name and path.exists() else None


def cached_copy(name: str) -> Path | None:
    """Return the copy of a hub's model that an earlier download left here, or None. Needs no network and no library."""
    cache: Path = HUB_CACHE.value(os.environ) or HUB_HOME.value(os.environ) / "hub"
    model = cache.expanduser() / f"models--{name.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text().strip()
        found = model / "snapshots" / revision
        return found if revision and (found / "config.json").exists() else None
    except (OSError, ValueError):  # a name that cannot be a path is in no cache
        return None


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread of its own: one stuck in a resolver must delay neither the loop nor the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(keep: Callable[[Any], None], value: object) -> None:
        if not done.cancelled():
            keep(value)

    def body() -> None:
        found: tuple[Callable[[Any], None], object]
        try:
            found = done.set_result, work()
        except StopIteration as error:  # a future cannot carry it
            found = done.set_exception, RuntimeError(f"unexpected StopIteration: {error}")
        except BaseException as error:  # handed to the waiting task
            found = done.set_exception, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *found)

    threading.Thread(target=body, name="model-hub", daemon=True).start()
    return await done

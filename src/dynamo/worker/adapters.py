"""A LoRA adapter in discovery: its base model's card under the adapter's name, so that clients ask for it as a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.protocol.records import slugify
from dynamo.worker.registration import ModelEndpoint

__all__ = ["adapter_directory", "adapter_name", "path_member", "publish_adapter"]

MAX_NAME_CHARS: Final = 256
MAX_PATH_CHARS: Final = 4096  # of Linux


async def publish_adapter(endpoint: ModelEndpoint, name: str, others: Iterable[str]) -> None:
    """Publish the card of an adapter; `unregister_model` withdraws it. `others` are the adapters that are loaded.

    Raises InvalidArgument where no base model is registered, or where the name cannot be told from another model's.
    """
    base = await endpoint.published_model(None)
    if base is None:
        raise InvalidArgument("the base model is not registered, so no adapter can be")
    slug = slugify(name)
    if slug == base.get("slug") or any(slugify(other) == slug for other in others if other != name):
        raise InvalidArgument(f"lora_name {name!r} is too much like another model's name")
    record = {**base, "display_name": name, "slug": slug, "lora": {"name": name}}
    record.pop("aliases", None)
    await endpoint.publish_model(record, slug)


def adapter_name(body: Mapping[str, Any]) -> str:
    """Return `lora_name` of an update's body. Raises InvalidArgument."""
    return _text(body, "lora_name", MAX_NAME_CHARS)


def adapter_directory(body: Mapping[str, Any]) -> Path:
    """Return `lora_path`, or what the native form `{"source": {"uri": "file:///..."}}` means. Raises InvalidArgument."""
    source = body.get("source")
    if source is None:
        return path_member(body, "lora_path")
    uri = source.get("uri") if isinstance(source, Mapping) else None
    if not isinstance(uri, str) or not uri.startswith("file:///"):
        raise InvalidArgument(f"source.uri must be a file:/// address, got {uri!r}")
    return Path(uri.removeprefix("file://"))


def path_member(body: Mapping[str, Any], name: str) -> Path:
    """Return a member of an update's body that is a path, with `~` resolved. Raises InvalidArgument naming the member."""
    return Path(_text(body, name, MAX_PATH_CHARS)).expanduser()


def _text(body: Mapping[str, Any], name: str, most_chars: int) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most_chars:
        raise InvalidArgument(f"{name} must be a string of 1 to {most_chars} characters, got {value!r}")
    return value

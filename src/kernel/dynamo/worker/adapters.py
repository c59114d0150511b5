"""A LoRA adapter in discovery: its base model's card under the adapter's name, so that clients request it as a model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from dynamo.errors import CannotConnect, InvalidArgument
from dynamo.protocol.records import slugify
from dynamo.runtime.calls.context import Context
from dynamo.runtime.calls.request_plane.base import ResponseSink
from dynamo.worker.registration import ModelEndpoint

OPERATIONS: Final = ("load_lora", "unload_lora", "list_loras")
HUB_SCHEME: Final = "hf://"
MAX_NAME_CHARS: Final = 256
MAX_PATH_CHARS: Final = 4096  # of Linux


async def publish_adapter(
    endpoint: ModelEndpoint, name: str, others: Iterable[str], source: Mapping[str, object] | None = None
) -> None:
    """Publish the card of an adapter; `unregister_model` withdraws it. `others` are the adapters that are loaded.

    `source`: of the update's body. One that a frontend manages is written into the card, so that workers that come later get it.

    Raises InvalidArgument where no base model is registered, or where the name cannot be distinguished from another model's.
    """
    base = await endpoint.published_model(None)
    if base is None:
        raise InvalidArgument("the base model is not registered, so no adapter can be")
    slug = slugify(name)
    if slug == base.get("slug") or any(slugify(other) == slug for other in others if other != name):
        raise InvalidArgument(f"lora_name {name!r} is too much like another model's name")
    lora: dict[str, object] = {"name": name}
    if source is not None and source.get("managed") is True:
        lora["source"] = source["uri"]
    record = {**base, "display_name": name, "slug": slug, "lora": lora}
    record.pop("aliases", None)
    await endpoint.publish_model(record, slug)


def adapter_name(body: Mapping[str, object]) -> str:
    """Return `lora_name` of an update's body. Raises InvalidArgument."""
    return _text(body, "lora_name", MAX_NAME_CHARS)


async def adapter_directory(body: Mapping[str, object]) -> Path:
    """Return `lora_path`, or what the native form `{"source": {"uri": "file:///..."}}` means, fetching one of a hub.

    Raises InvalidArgument for an address of another kind, CannotConnect where the hub does not give it.
    """
    source = body.get("source")
    if source is None:
        return path_member(body, "lora_path")
    uri = source.get("uri") if isinstance(source, Mapping) else None
    if isinstance(uri, str) and uri.startswith(HUB_SCHEME) and len(uri) <= MAX_PATH_CHARS:
        return await asyncio.to_thread(_fetch, uri.removeprefix(HUB_SCHEME))
    if not isinstance(uri, str) or not uri.startswith("file:///"):
        raise InvalidArgument(f"source.uri must be a file:/// address or hf://ORGANISATION/NAME, got {uri!r}")
    return Path(uri.removeprefix("file://"))


def adapter_uri(given: str) -> tuple[str, str]:
    """Return name and URI of an adapter that is loaded at start, `NAME=PATH` or `NAME=URI`."""
    name, _, source = given.partition("=")
    return name, source if "://" in source else Path(source).expanduser().absolute().as_uri()


def adapter_source(body: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the `source` of an update's body; None where it has a path."""
    source = body.get("source")
    return source if isinstance(source, Mapping) else None


def _fetch(name: str) -> Path:
    """Return the local copy of an adapter of the hub, `ORGANISATION/NAME[@REVISION]`."""
    repository, _, revision = name.partition("@")
    try:
        import huggingface_hub
    except ImportError as error:
        raise CannotConnect(f"fetch {name!r}: the package huggingface_hub is not installed") from error
    try:
        found = huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=["adapter_*"])
    except Exception as error:  # the hub client raises its transport's errors as they are
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CannotConnect(f"fetch {name!r}: {reason}") from error
    return Path(str(found))


def path_member(body: Mapping[str, object], name: str) -> Path:
    """Return a member of an update's body that is a path, with `~` resolved. Raises InvalidArgument naming the member."""
    return Path(_text(body, name, MAX_PATH_CHARS)).expanduser()


def _text(body: Mapping[str, object], name: str, most_chars: int) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= most_chars:
        raise InvalidArgument(f"{name} must be a string of 1 to {most_chars} characters, got {value!r}")
    return value


class AdapterRequests:
    """Loads, unloads and lists adapters for frontends, over the request plane; a runtime `Handler`."""

    def __init__(self, routes: Mapping[str, Callable[[object], Awaitable[dict[str, object]]]]) -> None:
        """`routes`: the admin routes of the worker, which go the same way."""
        self._routes = routes

    async def handle(self, body: object, context: Context, sink: ResponseSink) -> None:
        """Answer one request: its member `operation` names it, the others are those of the admin route."""
        members = body if isinstance(body, Mapping) else {}
        operation = members.get("operation")
        route = self._routes.get(f"update/{operation}") if operation in OPERATIONS else None
        if route is None:
            raise InvalidArgument(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
        answer = await route({name: value for name, value in members.items() if name != "operation"})
        sink.send_object({"data": answer})
        sink.end()

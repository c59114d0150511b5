"""The media in the messages of a chat: taken out as parts, so that templates see only where they stood.

What a part is named in errors is where the client wrote it, also where another API was made a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from dynamo.protocol.openai.errors import RequestRejected
from dynamo.protocol.openai.shapes import JsonObject, MediaPart, RequestMedia

MediaKind = Literal["image", "video", "audio"]

_KINDS: Final[Mapping[str, MediaKind]] = {"image": "image", "video": "video", "audio": "audio"}
_URL_PARTS: Final[Mapping[str, MediaKind]] = {f"{kind}_url": kind for kind in _KINDS.values()}
_DATA: Final = "data:"


class PlacedPart(dict[str, Any]):
    """A part of a message that was made of something else; errors name that."""

    __slots__ = ("where",)

    def __init__(self, where: str, members: Mapping[str, Any]) -> None:
        super().__init__(members)
        self.where = where


def take_media(messages: list[JsonObject]) -> tuple[list[JsonObject], RequestMedia]:
    """Return the messages for a template, each part of media as `{"type": "image"}`, and the media.

    The messages have the shapes of a chat. Raises RequestRejected (400) that names the part.
    """
    found: list[MediaPart] = []
    shown, kept = list(messages), list(messages)
    for position, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        parts = [_part(part, f"messages[{position}].content[{number}]") for number, part in enumerate(content)]
        found += [part for part in parts if part is not None]
        normal = [
            given if part is None else part.shown or {"type": part.kind}
            for given, part in zip(content, parts, strict=True)
        ]
        shown[position] = {**message, "content": normal}
        kept[position] = {**message, "content": [_without_data(given) for given in content]}
    return shown, RequestMedia(found, kept)


def _part(part: JsonObject, where: str) -> MediaPart | None:
    """Return the media of a part; None for text."""
    kind = part["type"]
    if kind in ("text", "refusal"):
        return None
    if isinstance(part, PlacedPart):
        where = part.where
    if kind == "input_audio":
        return _input_audio(part, where)
    if kind == "file":
        return _file(part, where)
    given = part.get(kind)
    url = given.get("url") if isinstance(given, dict) else given
    uuid = part.get("uuid")
    if uuid is None and isinstance(given, dict):
        uuid = given.get("uuid")
    if isinstance(given, dict) and isinstance(file_id := given.get("file_id"), str):
        return _uploaded(_URL_PARTS[kind], file_id, uuid, where)
    if uuid == "":
        raise refused_part(where, "`uuid` must not be empty")
    if url is None and uuid is None:
        raise refused_part(where, f"a part of type {kind} needs a URL, or the `uuid` of what was sent before")
    if url == "":
        raise refused_part(where, "the URL is empty")
    return MediaPart(_URL_PARTS[kind], url, uuid, where)


def _input_audio(part: JsonObject, where: str) -> MediaPart:
    audio = part["input_audio"]
    if not audio["data"]:
        raise refused_part(where, "`data` is empty")
    if audio["data"].startswith(_DATA):
        return MediaPart("audio", audio["data"], part.get("uuid"), where)
    return MediaPart("audio", f"data:audio/{audio['format']};base64,{audio['data']}", part.get("uuid"), where)


def _file(part: JsonObject, where: str) -> MediaPart:
    file = part["file"]
    data = file.get("file_data")
    if data is None and isinstance(file_id := file.get("file_id"), str):
        return _uploaded(None, file_id, part.get("uuid"), where)
    if data is None:
        raise refused_part(where, "a file needs its `file_data`, or the `file_id` of one that was uploaded")
    kind = _KINDS.get(data[len(_DATA) : 100].partition("/")[0].lower()) if data.startswith(_DATA) else None
    if kind is None:
        raise refused_part(where, "`file_data` must be a data URL of an image, audio or video")
    return MediaPart(kind, data, part.get("uuid"), where)


def _uploaded(kind: MediaKind | None, file_id: str, uuid: str | None, where: str) -> MediaPart:
    """Return a part that names an uploaded file; `kind` None: whatever media it is."""
    if not file_id:
        raise refused_part(where, "the `file_id` is empty")
    return MediaPart(kind or "image", None, uuid, where, file_id, {"type": kind or "file"})


def _without_data(part: JsonObject) -> JsonObject:
    """Return a part as engines see it beside its content: a data URL is empty there."""
    copy = dict(part)
    for name, member in (*((name, "url") for name in _URL_PARTS), ("input_audio", "data"), ("file", "file_data")):
        given = copy.get(name)
        if isinstance(given, dict) and _is_data(given.get(member), name):
            copy[name] = {**given, member: ""}
        elif isinstance(given, str) and given[:5].lower() == _DATA:
            copy[name] = ""
    return copy


def _is_data(value: object, name: str) -> bool:
    return isinstance(value, str) and (name not in _URL_PARTS or value[:5].lower() == _DATA)


def refused_part(where: str, reason: str) -> RequestRejected:
    """Return the 400 for a part."""
    return RequestRejected(400, f"Validation: {where}: {reason}", param=where)

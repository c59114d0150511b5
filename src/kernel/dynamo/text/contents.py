"""Contents of messages in the form that a template reads: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dynamo.text.template_probe import ContentForm, Message, Messages

_ROLES: Final = {"developer": "system", "function": "tool"}  # that templates read as another
_MEDIA: Final = frozenset({"image", "video", "audio"})  # as validation leaves them in a message


def are_plain(messages: Messages) -> bool:
    """Return whether every message has a role, a text and nothing more: no parts, no calls, no reasoning."""
    for message in messages:
        if len(message) != 2 or "role" not in message or message.get("content").__class__ is not str:
            return False
    return True


def in_form(messages: Messages, form: ContentForm) -> list[Message]:
    """Return the messages with each content as the template reads it; a message that needs no change is the same object.

    A template that reads parts gets them as they were sent. For any other the texts are joined by newlines, and media,
    for which it has no place, are left out. A template that reads nothing else gets a text as a list of one part.
    """
    return [_in_form(message, form) for message in messages]


def _in_form(message: Message, form: ContentForm) -> Message:
    content = message.get("content")
    role = message.get("role", "")
    role = _ROLES.get(role, role)
    if isinstance(content, list):
        parts = [_as_part(part) for part in content]
        if role in form.parts:
            return message if parts == content else {**message, "content": parts}
        if not all(isinstance(part, Mapping) and ("text" in part or part.get("type") in _MEDIA) for part in parts):
            return message  # a form of the application's own, which its template may know
        content = "\n".join(part["text"] for part in parts if "text" in part)
        message = {**message, "content": content}
    if isinstance(content, str) and role in form.only_parts:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def _as_part(part: Any) -> Any:
    """Return a text or a refusal as a part of text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal", "")}
    return part

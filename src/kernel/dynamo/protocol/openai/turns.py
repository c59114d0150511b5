"""A conversation for a template that is particular about whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.protocol.openai.shapes import JsonObject


def alternating(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the conversation for a template that refused it: users and assistants in turns, and each call with its result.

    A system message behind the first message becomes text of a user, texts of the same role are joined, and a call that
    was never answered gets an empty result.
    """
    found: list[JsonObject] = []
    unanswered: list[str] = []
    for position, message in enumerate(messages):
        role = message["role"]
        if role == "system" and position:
            role, message = "user", {"role": "user", "content": message["content"]}
        if role == "tool":
            if message["tool_call_id"] in unanswered:
                unanswered.remove(message["tool_call_id"])
        else:
            found += [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in unanswered]
            unanswered = [call["id"] for call in message.get("tool_calls") or ()]
        before = found[-1] if found else {}
        if role == before.get("role") and role in ("user", "assistant"):
            found[-1] = _joined(before, message)
        else:
            found.append(message)
    return [*found, *({"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in unanswered)]


def _joined(before: JsonObject, after: JsonObject) -> JsonObject:
    both = {**before, **after}
    for name in ("content", "reasoning_content"):
        texts = [_text_of(message[name]) for message in (before, after) if message.get(name)]
        if name in both:
            both[name] = "\n\n".join(texts)
    calls = [*(before.get("tool_calls") or ()), *(after.get("tool_calls") or ())]
    return {**both, "tool_calls": calls} if calls else both


def _text_of(content: str | list[JsonObject]) -> str:
    """Return a content as text; its parts are text, as no other part gets as far as a template."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)

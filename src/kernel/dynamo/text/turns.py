"""A conversation for a template that is particular about whose turn it is, or has no place for a text of the system."""

from __future__ import annotations

from typing import Any, Final

from dynamo.text.template_probe import Message, Messages, RoleForm

_SYSTEM: Final = ("system", "developer")


def with_placed_systems(messages: Messages, form: RoleForm) -> Messages:
    """Return the conversation with each text of the system where a template of this form shows it.

    Those at the beginning are joined; a later one, and each for a family without that role, becomes text of a user in
    its place, so that a longer conversation still begins as the shorter one did. It is joined with the user's texts
    beside it.
    """
    for message in messages:
        if message.get("role") in _SYSTEM:
            break
    else:
        return messages
    found: list[Message] = []
    leads, was_moved = True, False  # only the system has spoken; the last text was the system's
    for message in messages:
        is_moved = False
        if message.get("role") == "developer" and not form.knows_developer:
            message = {**message, "role": "system"}
        if message.get("role") in _SYSTEM:
            is_known = form.knows_system or message["role"] == "developer"
            is_moved = not is_known or not (leads or form.takes_later)
            if is_moved:
                message = {**message, "role": "user"}
        leads = leads and message.get("role") in _SYSTEM
        is_joined = (leads and not form.takes_several) or ((is_moved or was_moved) and message.get("role") == "user")
        if found and is_joined and (leads or found[-1].get("role") == "user"):
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
        was_moved = is_moved
    return found


def alternating(messages: Messages) -> list[Message]:
    """Return the conversation for a template that refused it: users and assistants in turns, and each call with its result.

    A system message behind the first message becomes text of a user, texts of the same role are joined, and a call that
    was never answered gets an empty result.
    """
    found: list[Message] = []
    unanswered: list[str] = []
    for position, message in enumerate(messages):
        role = message.get("role")
        if role == "system" and position:
            role, message = "user", {"role": "user", "content": message.get("content")}
        if role == "tool":
            if message.get("tool_call_id") in unanswered:
                unanswered.remove(message["tool_call_id"])
        else:
            found += [_no_result(call_id) for call_id in unanswered]
            unanswered = [call["id"] for call in message.get("tool_calls") or () if "id" in call]
        before = found[-1] if found else {}
        if role == before.get("role") and role in ("user", "assistant"):
            found[-1] = _joined(before, message)
        else:
            found.append(message)
    return [*found, *map(_no_result, unanswered)]


def _no_result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": ""}


def _joined(before: Message, after: Message) -> Message:
    """Return two messages as one of the first one's role."""
    both = {**before, **after, "role": before["role"]}
    for name in ("content", "reasoning_content"):
        if name in both:
            both[name] = _joined_contents(before.get(name), after.get(name))
    calls = [*(before.get("tool_calls") or ()), *(after.get("tool_calls") or ())]
    return {**both, "tool_calls": calls} if calls else both


def _joined_contents(before: Any, after: Any) -> Any:
    """Join two contents by an empty line; what is not text stands between texts as it did."""
    if not before or not after:
        return before or after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    left, right = _parts(before), _parts(after)
    if "text" in left[-1] and "text" in right[0]:
        left[-1] = {**left[-1], "text": f"{left[-1]['text']}\n\n{right.pop(0)['text']}"}
    return [*left, *right]


def _parts(content: Any) -> list[Any]:
    parts = content if isinstance(content, list) else [content]
    return [{"type": "text", "text": part} if isinstance(part, str) else dict(part) for part in parts]

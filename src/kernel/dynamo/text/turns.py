"""A conversation for a template that is particular about whose turn it is, or has no place for a text of the system."""

from __future__ import annotations

from typing import Any, Final

from dynamo.text.template_probe import Message, Messages, RoleForm

_SYSTEM: Final = ("system", "developer")
_AT_THE_FRONT: Final = RoleForm(knows_developer=True, takes_several=False, takes_later=False)


def with_placed_systems(messages: Messages, form: RoleForm) -> Messages:
    """Return the conversation with each text of the system where a template of this form shows it.

    Those that it does not show in their place are joined at the front: by those at the beginning or, for a family
    without that role, before the first text of the user. So a later one changes the prompt from its beginning on. One
    that ends the conversation behind an answer is what the model is to go on from, and becomes text of a user there.
    """
    for message in messages:
        if message.get("role") in _SYSTEM:
            break
    else:
        return messages
    front: list[Message] = []
    rest: list[Message] = []
    for message in messages:
        if message.get("role") == "developer" and not form.knows_developer:
            message = {**message, "role": "system"}
        leads = not rest
        if message.get("role") in _SYSTEM and (leads or not form.takes_later):
            front.append(message)
        else:
            rest.append(message)
    if rest and rest[-1].get("role") == "assistant" and messages[-1].get("role") in _SYSTEM and not form.takes_later:
        rest.append({**front.pop(), "role": "user"})
    unknown = [] if form.knows_system else [message for message in front if message["role"] == "system"]
    known = front if form.knows_system else [message for message in front if message["role"] != "system"]
    if unknown:
        text = {**_as_one(unknown), "role": "user"}
        is_users = bool(rest) and rest[0].get("role") == "user"
        rest[: 1 if is_users else 0] = [_joined(text, rest[0]) if is_users else text]
    if known and not form.takes_several:
        known = [_as_one(known)]
    return [*known, *rest]


def alternating(messages: Messages) -> list[Message]:
    """Return the conversation for a template that refused it: users and assistants in turns, and each call with its result.

    System messages are joined at the front, texts of the same role are joined, and a call that was never answered gets an
    empty result.
    """
    found: list[Message] = []
    unanswered: list[str] = []
    for message in with_placed_systems(messages, _AT_THE_FRONT):
        role = message.get("role")
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


def _as_one(messages: Messages) -> Message:
    found, *others = messages
    for message in others:
        found = _joined(found, message)
    return found


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

"""What engines of the native system read out of a request, and the words for how an answer ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dynamo.contract.requests.invalid import InvalidRequest


def agent_context_from_request(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request's `agent_context` object, or None."""
    found = request.get("agent_context")
    return found if isinstance(found, dict) else None


def session_id_from_request(request: Mapping[str, Any]) -> str | None:
    """Return the session id without surrounding blanks; None when it is absent, empty or not text."""
    session_id = (agent_context_from_request(request) or {}).get("session_id")
    if not isinstance(session_id, str):
        return None
    return session_id.strip() or None


class InputParamManager:
    """Finds the prompt of a request: its token ids, or what the engine's own tokenizer makes of its text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get_input_param(self, request: dict[str, Any], use_tokenizer: bool) -> Any:
        """Return the prompt: `token_ids` as they are, or with `use_tokenizer` the rendered chat or the encoded text.

        Earlier reasoning is put into its message, between think tags, in place. Raises InvalidRequest for a request that
        has neither `messages`, `prompt` nor `text`.
        """
        if not use_tokenizer:
            return request.get("token_ids")
        if "messages" in request:
            _inline_reasoning(request["messages"])
            options = request.get("chat_template_args") or request.get("chat_template_kwargs") or {}
            return self.tokenizer.apply_chat_template(
                request["messages"], tokenize=False, add_generation_prompt=True, **options
            )
        for name in ("prompt", "text"):
            if name in request:
                return self.tokenizer.encode(request[name])
        raise InvalidRequest("the request has no input: one of messages, prompt and text is needed")


def resolve_thinking_token_budget(request: dict[str, Any]) -> Any:
    """Return the budget of reasoning tokens that a request sets, or None."""
    budget = request.get("thinking_token_budget")
    if budget is not None:
        return budget
    extension = request.get("nvext")
    return extension.get("max_thinking_tokens") if isinstance(extension, dict) else None


def _inline_reasoning(messages: list[Any]) -> None:
    for message in messages:
        if isinstance(message, dict) and isinstance(message.get("reasoning_content"), str):
            reasoning = message.pop("reasoning_content")
            message["content"] = f"<think>{reasoning}</think>{message.get('content') or ''}"


def normalize_finish_reason(finish_reason: str) -> str:
    """Turn any `abort...` into `cancelled`; leave every other reason alone."""
    return "cancelled" if finish_reason.startswith("abort") else finish_reason


def trailing_stop_prefix_len(text: str, stop_strings: Collection[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop string, or a whole one."""
    longest = min(len(text), max(map(len, stop_strings), default=0))
    return next(
        (size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in stop_strings)), 0
    )


def with_engine_data(completion: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a chunk with `values` added to its `engine_data`, which clients can request in `nvext.extra_fields`.

    Raises ValueError for a key that is there already, and for an `engine_data` or values that are not a mapping.
    """
    held = completion.get("engine_data")
    held = {} if held is None else held
    for name, given in (("completion.engine_data", held), ("values", values)):
        if not isinstance(given, Mapping):
            raise ValueError(f"{name} must be a mapping, got {type(given).__name__}")
    if clash := [key for key in values if key in held]:
        raise ValueError(f"engine_data already contains keys: {', '.join(map(repr, clash))}")
    return {**completion, "engine_data": {**held, **values}}

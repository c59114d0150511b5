"""The prompt of a request, for engines that take text or tokens."""

from __future__ import annotations

from typing import Any

from dynamo.contract.requests.invalid import InvalidRequest

__all__ = ["InputParamManager", "resolve_thinking_token_budget"]


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

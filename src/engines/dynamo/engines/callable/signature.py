"""How a Python callable is called for a request: read from its signature, once, before anything is served.

The names of its parameters define what it receives. One of them is the prompt: `messages` (the conversation, a list of dicts),
`prompt` (text) or `token_ids` (a list of ints); a first parameter of another name counts by its annotation. `context` is
the request's `Context`. Every other parameter is an option of the request, by its OpenAI name; `**options` takes all that
are set.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.plain_text import conversation_text

OPTIONS: Final = (
    "model",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "user",
    "metadata",
    "tools",
    "tool_choice",
    "response_format",
    "reasoning_effort",
)
"""What a parameter may be called, beside the prompt and the context."""

_CONSTRAINTS: Final = ("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice")
_TOKEN_ONLY: Final = ("logprobs", "top_logprobs", "prompt_logprobs", "stop_token_ids", "allowed_token_ids")


class Source(Enum):
    """What the callable takes."""

    MESSAGES = "messages"
    PROMPT = "prompt"
    TOKEN_IDS = "token_ids"


class CallableKind(Enum):
    """How it gives its answer."""

    ASYNC_GENERATOR = "async generator"
    COROUTINE = "coroutine"
    SYNC = "sync"  # a generator or a plain function: it runs in a thread


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A callable and how to call it."""

    function: Callable[..., Any]
    name: str
    kind: CallableKind
    source: Source
    parameter: str  # the one that takes the prompt
    context: bool  # whether it takes `context`
    options: frozenset[str]
    takes_all: bool  # `**options`

    @property
    def limits_itself(self) -> bool:
        """Return whether the callable enforces `max_tokens` itself."""
        return self.takes("max_tokens")

    def takes(self, option: str) -> bool:
        return self.takes_all or option in self.options

    def for_text(self, body: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Return the arguments for an OpenAI body. Raises InvalidArgument naming the field that cannot be served."""
        self._check(body)
        messages, prompt = body.get("messages"), body.get("prompt")
        if isinstance(messages, list):
            value: Any = messages if self.source is Source.MESSAGES else conversation_text(messages)
        elif isinstance(prompt, str):
            value = [{"role": "user", "content": prompt}] if self.source is Source.MESSAGES else prompt
        else:
            raise InvalidArgument("prompt must be text: this model takes text, not token ids")
        stop = body.get("stop")
        limit = body.get("max_completion_tokens")
        return self._arguments(
            value,
            context,
            {
                **body,
                "max_tokens": body.get("max_tokens") if limit is None else limit,
                "stop": [stop] if isinstance(stop, str) else stop,
            },
        )

    def for_tokens(self, request: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Return the arguments for a preprocessed request."""
        groups = [request.get("stop_conditions") or {}, request.get("sampling_options") or {}]
        return self._arguments(request["token_ids"], context, {"model": request.get("model"), **groups[0], **groups[1]})

    def _arguments(self, prompt: Any, context: Any, said: Mapping[str, Any]) -> dict[str, Any]:
        wanted = OPTIONS if self.takes_all else self.options
        arguments = {name: said[name] for name in wanted if said.get(name) is not None}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if name in self.options and name not in arguments and parameter.default is parameter.empty:
                arguments[name] = None  # an option that is not set and has no default of its own
        arguments[self.parameter] = prompt
        if self.context:
            arguments["context"] = context
        return arguments

    def _check(self, body: Mapping[str, Any]) -> None:
        for name in _TOKEN_ONLY:
            if body.get(name):
                raise InvalidArgument(f"{name} needs token ids, and this model takes and gives text")
        for name in _CONSTRAINTS:
            value = body.get(name)
            if value and not self.takes(name) and value != {"type": "text"}:
                raise InvalidArgument(f"{name} is not served by this model: {self.name}() has no such parameter")
        choice = body.get("tool_choice")
        if choice not in (None, "none", "auto") and not self.takes("tool_choice"):
            raise InvalidArgument(f"tool_choice is not served by this model: {self.name}() has no such parameter")


def plan_call(function: Callable[..., Any], name: str) -> CallPlan:
    """Read the signature. Raises InvalidArgument naming which parameter is not understood, and what would be."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} has no signature to read; wrap it in a function of your own") from error
    hints = _hints(function)
    source: Source | None = None
    prompt = ""
    options = set[str]()
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidArgument(f"{name}(): parameter {parameter.name!r} is positional-only; arguments go by name")
        found = _source_of(parameter.name, hints.get(parameter.name) if parameter is _first(parameters) else None)
        if found is not None and source is not None:
            raise InvalidArgument(f"{name}(): {prompt!r} and {parameter.name!r} are both a prompt; take one of them")
        if found is not None:
            source, prompt = found, parameter.name
        elif parameter.name in OPTIONS:
            options.add(parameter.name)
        elif parameter.name != "context" and parameter.default is parameter.empty:
            raise InvalidArgument(
                f"{name}(): parameter {parameter.name!r} is not known. Take one of messages, prompt and token_ids, and "
                f"beside it context or options of the request ({', '.join(OPTIONS)}); anything else needs a default"
            )
    if source is None:
        raise InvalidArgument(f"{name}() takes no prompt: give it a parameter messages, prompt or token_ids")
    return CallPlan(
        function,
        name,
        _kind_of(function),
        source,
        prompt,
        "context" in parameters,
        frozenset(options),
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()),
    )


def _first(parameters: Mapping[str, inspect.Parameter]) -> inspect.Parameter:
    return next(iter(parameters.values()))


def _source_of(name: str, annotation: Any) -> Source | None:
    """Decide by the name; a first parameter of any other name by its annotation: `str`, `list[int]`, or a list of messages."""
    if name in (source.value for source in Source):
        return Source(name)
    if annotation is None or name == "context" or name in OPTIONS:
        return None
    if annotation is str:
        return Source.PROMPT
    if typing.get_origin(annotation) in (list, Sequence):
        return Source.TOKEN_IDS if typing.get_args(annotation) == (int,) else Source.MESSAGES
    return None


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):  # an annotation only a type checker can resolve: then the names decide
        return {}


def _kind_of(function: Callable[..., Any]) -> CallableKind:
    bare = inspect.unwrap(function)
    while isinstance(bare, functools.partial):
        bare = inspect.unwrap(bare.func)
    target = bare if inspect.isroutine(bare) else type(bare).__call__
    if inspect.isasyncgenfunction(target):
        return CallableKind.ASYNC_GENERATOR
    return CallableKind.COROUTINE if inspect.iscoroutinefunction(target) else CallableKind.SYNC

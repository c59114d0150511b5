"""The rules a well-formed request must also keep, each with its text and its place in the order.

The order is part of the contract: the first broken rule is the one a client receives. All are 400 with the prefix
`Validation: ` unless the row has its own; what this version cannot do yet is a 422 with the code "not_built".
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from dynamo.protocol.openai.body import deserialisation_error
from dynamo.protocol.openai.errors import RequestRejected, not_built
from dynamo.protocol.openai.media_parts import take_media
from dynamo.protocol.openai.shapes import (
    REQUIRED,
    U64_MAX,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    JsonObject,
    Message,
    Tool,
)
from dynamo.protocol.openai.strict_schema import strictness_fault

MAX_OUTPUT_TOKENS: Final = 1_048_576
MAX_CHOICES: Final = 128  # n, and batch x n
MAX_STOPS: Final = 32
MAX_TOP_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 20  # OpenAI has 5; engines give 20, and refuse what they do not
MAX_SCORES: Final = 262_144
"""Log probabilities, alternatives included, in an answer of several choices: some 15 MB of JSON, and ten times as much while
workers are faster than the frontend."""
MAX_BAD_WORDS: Final = 128
MAX_BAD_WORD: Final = 256  # characters
MAX_TOOLS: Final = 1536
MAX_SUFFIX_CHARACTERS: Final = 10_000
MAX_GRAMMAR_NESTING: Final = 500
MIN_EMBEDS_BYTES: Final = 100
MAX_EMBEDS_BYTES: Final = 10 * 1024 * 1024
MAX_NAMED_UNSUPPORTED: Final = 16  # unknown keys spelt out in one message; the rest is a count
LET_PASS: Final = (
    ". A frontend with DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS=1 in its environment ignores them "
    "(python -m dynamo.frontend --ignore-unsupported-fields)"
)
NOT_STORED: Final = (
    "`store`: true asks for an answer that is kept, and none is kept on this route: send it to /v1/responses" + LET_PASS
)
MAX_LISTED_STRINGS: Final = 1024  # annotations, extra fields, taints: lists that only name things

_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TOKEN_ID_KEY: Final = re.compile(r"[0-9]{1,10}")

T = TypeVar("T")

SPECIAL: Final = (
    "functions", "function_call", "top_logprobs", "stop", "tools", "tool_choice", "parallel_tool_calls", "nvext", "priority",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "guided_whitespace_pattern", "guided_decoding_backend", "bad_words", "bad_words_token_ids", "truncate_prompt_tokens",
    "request_id", "chat_template_args", "chat_template_kwargs", "thinking", "thinking_token_budget", "reasoning_effort",
    "verbosity", "documents", "add_generation_prompt", "continue_final_message", "media_io_kwargs", "mm_processor_kwargs",
    "modalities", "audio", "web_search_options", "logit_bias", "detokenize", "allowed_token_ids", "logprob_token_ids",
)  # fmt: skip
"""Members that few chats have. Each has rules and uses of its own; one search for all of them spares a plain chat these."""
_special: Final = attrgetter(*SPECIAL)
_NONE: Final = (None,) * len(SPECIAL)
_TEXT_ROLES: Final = ("user", "system", "assistant", "developer")  # whose messages need nothing but a text


# Judges of what a request keeps as the client's own dicts. Structs, because msgspec compiles a struct's type once and a
# bare `list[...]` on every call; and so the path in an error starts at the field's name.
class _Messages(msgspec.Struct):
    messages: list[Message]


class _Tools(msgspec.Struct):
    tools: list[Tool]


def validate_chat(request: ChatRequest) -> None:
    """Refuse a chat request that breaks a rule, and take the media out of its messages. To be called once.

    Raises:
        RequestRejected: 400, or 422 for what is deprecated or not built.
    """
    request.is_plain = is_plain = _special(request) == _NONE
    if request.functions is not None:
        _deprecated("functions", "tools")
    if request.function_call is not None:
        _deprecated("function_call", "tool_choice")
    if not request.messages:
        _invalid("The 'messages' field cannot be empty. At least one message is required.", "messages")
    if request.stream_options is not None:
        _check_stream_options(request)
    if request.unsupported:
        check_supported(request.unsupported)
    if request.store is True:
        _invalid(NOT_STORED, "store")
    if not is_plain:
        _check_vllm_members(request)
    if not (are_texts := _are_texts(request.messages)):
        _convert({"messages": request.messages}, _Messages)
    _check_model(request)
    if request.max_tokens is not None:
        _check_output_limit(request.max_tokens, "max_tokens")
    if request.max_completion_tokens is not None:
        _check_output_limit(request.max_completion_tokens, "max_completion_tokens")
    _check_sampling(request)
    if request.top_logprobs is not None:
        _check_range("Top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS, "top_logprobs")
        if request.logprobs is not True:
            _invalid("The 'top_logprobs' field is only allowed when 'logprobs' is set to true.", "top_logprobs")
    if request.logprobs is True:
        _check_scores(request.requested_logprobs or 0, request.choices_per_prompt, request.output_limit)
    if not is_plain:
        _check_stop(request, prefix="")
        if request.tools is not None:
            _check_tools(request.tools)
        _check_response_format(request)
        _check_guided(request)
        _check_template_controls(request)
        _check_nvext(request, prompts=1)
        _check_tool_choice(request)
        _check_not_built(request)
    if not are_texts and _has_media(request.messages):
        request.messages, request.media = take_media(request.messages)


def most_scored_tokens(alternatives: int, choices: int) -> int:
    """Return how many tokens with log probabilities each of several choices may have."""
    return max(1, MAX_SCORES // (choices * (1 + alternatives)))


def _check_scores(alternatives: int, choices: int, limit: int | None) -> None:
    if choices > 1 and limit is not None and limit > (most := most_scored_tokens(alternatives, choices)):
        _invalid(
            f"An answer of several choices may have at most {MAX_SCORES} log probabilities: with {choices} choices and "
            f"{alternatives} alternatives at each token max_tokens must not exceed {most}, got {limit}",
            "max_tokens",
        )


def check_prompt_scores(alternatives: int, tokens: int) -> None:
    """Refuse a request for more log probabilities of its prompts than fit into an answer.

    `tokens`: of all prompts, as often as they are generated from. Raises RequestRejected (400).
    """
    if tokens * (1 + alternatives) > MAX_SCORES:
        _invalid(
            f"An answer may have at most {MAX_SCORES} log probabilities of its prompts, got {alternatives} alternatives "
            f"at each of {tokens} tokens, those of every choice counted",
            "prompt_logprobs",
        )


def validate_completion(request: CompletionRequest) -> None:
    """Refuse a text completion request that breaks a rule.

    Raises:
        RequestRejected: 400.
    """
    _check_stream_options(request)
    check_supported(request.unsupported)
    if request.store is True:
        _invalid(NOT_STORED, "store")
    _check_vllm_members(request)
    _check_model(request)
    prompts = _check_prompt(request)
    if not (request.max_tokens == 0 and request.echo):  # then the prompt is the answer
        _check_output_limit(request.max_tokens, "max_tokens")
    _check_sampling(request)
    if prompts * request.choices_per_prompt > MAX_CHOICES:
        _invalid(
            f"The number of prompts times n must not exceed {MAX_CHOICES}, "
            f"got {prompts} x {request.choices_per_prompt}",
            "n",
        )
    if request.logprobs is not None:
        _check_range("Logprobs", request.logprobs, 0, MAX_COMPLETION_LOGPROBS, "logprobs")
        _check_scores(request.logprobs, prompts * request.choices_per_prompt, request.max_tokens)
    if request.best_of is not None:
        _check_range("Best_of", request.best_of, 0, 20, "best_of")
        if request.best_of < request.choices_per_prompt:
            _invalid(
                f"Best_of must be greater than or equal to n, got best_of {request.best_of} and "
                f"n {request.choices_per_prompt}",
                "best_of",
            )
    if request.suffix is not None and len(request.suffix) > MAX_SUFFIX_CHARACTERS:
        _invalid(f"Suffix must not exceed {MAX_SUFFIX_CHARACTERS} characters, got {len(request.suffix)}", "suffix")
    _check_stop(request, prefix="Validation: ")
    _check_response_format(request)
    _check_guided(request)
    _check_nvext(request, prompts=prompts)


# -- shared rules -------------------------------------------------------------------------------------------------------


def _check_stream_options(request: CommonRequest) -> None:
    if request.stream_options is not None and request.stream is not True:
        _invalid("The 'stream_options' field is only allowed when 'stream' is set to true.", "stream_options")


def check_supported(names: Sequence[str]) -> None:
    """Refuse unknown top-level keys of a body."""
    if names:
        shown = ", ".join(f"`{name[:64]}`" for name in names[:MAX_NAMED_UNSUPPORTED])
        more = f" and {len(names) - MAX_NAMED_UNSUPPORTED} more" if len(names) > MAX_NAMED_UNSUPPORTED else ""
        _invalid(f"Unsupported parameter(s): {shown}{more}{LET_PASS}", names[0][:64])


def _check_vllm_members(request: CommonRequest) -> None:
    if (words := request.bad_words) is not None:
        if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD for word in words):
            _invalid(f"Bad_words takes up to {MAX_BAD_WORDS} texts of up to {MAX_BAD_WORD} characters", "bad_words")
        if not all(map(str.strip, words)):
            _invalid("Bad_words cannot be empty", "bad_words")
    if request.truncate_prompt_tokens is not None and (
        request.truncate_prompt_tokens < -1 or request.truncate_prompt_tokens == 0
    ):
        _invalid("Truncate_prompt_tokens must be at least 1, or -1", "truncate_prompt_tokens")
    if request.request_id is not None and _REQUEST_ID.fullmatch(request.request_id) is None:
        _invalid("Request_id may hold up to 128 letters, digits, '.', '_', ':' and '-'", "request_id")


def _check_model(request: CommonRequest) -> None:
    if not request.model or request.model.isspace():
        _invalid("Model cannot be empty", "model")


def _check_output_limit(limit: int | None, param: str) -> None:
    if limit is None:
        return
    if limit <= 0:
        _invalid(f"Max tokens must be greater than 0, got {limit}", param)
    if limit > MAX_OUTPUT_TOKENS:
        _invalid(f"Max completion tokens must not exceed {MAX_OUTPUT_TOKENS}, got {limit}", param)


def _check_sampling(request: CommonRequest) -> None:
    temperature = request.temperature
    if temperature is not None:
        _check_range("Temperature", temperature, 0, 2, "temperature")
    top_p = request.top_p
    if top_p is not None and not 0 < top_p <= 1:
        _invalid(f"Top_p must be between 0 and 1, got {_number(top_p)}", "top_p")
    if request.top_k is not None and not -1 <= request.top_k < 2**31:
        _invalid(f"Top_k must be greater than or equal to -1, got {request.top_k}", "top_k")
    if request.min_p is not None:
        _check_range("Min_p", request.min_p, 0, 1, "min_p")
    if request.presence_penalty is not None:
        _check_range("Presence penalty", request.presence_penalty, -2, 2, "presence_penalty")
    if request.frequency_penalty is not None:
        _check_range("Frequency penalty", request.frequency_penalty, -2, 2, "frequency_penalty")
    repetition = request.repetition_penalty
    if repetition is not None and not 0 < repetition <= 2:
        _invalid(
            f"Repetition penalty must be greater than 0 and at most 2, got {_number(repetition)}", "repetition_penalty"
        )
    if request.logit_bias is not None:
        _check_logit_bias(request.logit_bias)
    n = request.n
    if n is not None:
        _check_range("n", n, 1, MAX_CHOICES, "n")
        if n > 1 and temperature == 0:
            _invalid(f"n must be 1 when temperature is 0 (every choice would be the same), got {n}", "n")


def _check_logit_bias(bias: dict[str, float]) -> None:
    for token, value in bias.items():
        if _TOKEN_ID_KEY.fullmatch(token) is None:
            _invalid(f"Logit bias keys must be token ids, got '{token[:64]}'", "logit_bias")
        if not -100 <= value <= 100:
            _invalid(f"Logit bias for token {token} must be between -100 and 100, got {_number(value)}", "logit_bias")


def _check_stop(request: CommonRequest, *, prefix: str) -> None:
    stop = request.stop
    if stop is None:
        return
    if isinstance(stop, str):
        stop = [stop]
    if len(stop) > MAX_STOPS:
        raise RequestRejected(
            400, f"{prefix}Maximum of {MAX_STOPS} stop sequences allowed, got {len(stop)}", param="stop"
        )
    if "" in stop:
        raise RequestRejected(400, f"{prefix}Stop sequence cannot be empty", param="stop")
    if len({type(item) for item in stop}) > 1:
        raise RequestRejected(400, f"{prefix}Stop must be strings or token ids, not both", param="stop")


def _check_guided(request: ChatRequest | CompletionRequest) -> None:
    guidance, structured = request.guidance, request.structured_outputs
    if not guidance and structured is None and request.response_format is None:
        return
    asked = [field for field, _ in guidance.values()]
    if structured is not None and any(field.startswith("guided_") for field in asked):
        _invalid("`structured_outputs` and `guided_*` say the same in two ways: send one of them", "structured_outputs")
    # A forced tool choice drops `response_format`, so there is nothing for it to disagree with.
    if "json" not in guidance and (not isinstance(request, ChatRequest) or request.forced_choice is None):
        form = request.response_format
        if form is not None and form.type != "text":
            asked.append("response_format")
    if "whitespace_pattern" in guidance and ("json" in guidance or "response_format" in asked):
        asked.remove(guidance["whitespace_pattern"][0])  # it shapes the JSON
    if not asked:
        return
    if len(asked) > 1:
        _invalid(
            f"Only one kind of guided decoding is allowed, got {', '.join(f'`{name}`' for name in asked)}", asked[1]
        )
    _check_wire("guided_json", request.guided_json)
    if structured is not None:
        _check_wire("structured_outputs", (structured.json, structured.structural_tag))
    grammar = request.guided_grammar
    if grammar is not None and (depth := _bracket_depth(grammar)) > MAX_GRAMMAR_NESTING:
        _invalid(
            f"Guided grammar nests {depth} brackets deep, at most {MAX_GRAMMAR_NESTING} are allowed", "guided_grammar"
        )


def _bracket_depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _check_nvext(request: CommonRequest, *, prompts: int) -> None:
    nvext = request.nvext
    if nvext is None:
        return
    for name in ("backend_instance_id", "prefill_worker_id", "decode_worker_id"):
        value = getattr(nvext, name)
        if value is not None and value > U64_MAX:
            _invalid(f"{name} must be between 0 and {U64_MAX}, got {value}", f"nvext.{name}")
    for name, listed in (("annotations", nvext.annotations), ("extra_fields", nvext.extra_fields)):
        if listed is not None and len(listed) > MAX_LISTED_STRINGS:
            _invalid(f"nvext.{name} must not hold more than {MAX_LISTED_STRINGS} entries", f"nvext.{name}")
    if (
        nvext.extra_fields is not None
        and "completion_token_ids" in nvext.extra_fields
        and prompts * request.choices_per_prompt > 1
    ):
        _invalid("nvext.extra_fields 'completion_token_ids' requires a single choice", "nvext.extra_fields")
    if nvext.token_data is not None and prompts > 1:
        _invalid("nvext.token_data replaces one prompt, but the request holds several", "nvext.token_data")


# -- chat ---------------------------------------------------------------------------------------------------------------


def _are_texts(messages: list[JsonObject]) -> bool:
    """Return whether every message is a role and a text: as in most chats, in which their judge finds nothing."""
    for message in messages:
        if len(message) != 2 or message.get("role") not in _TEXT_ROLES or message.get("content").__class__ is not str:
            return False
    return True


def _has_media(messages: list[JsonObject]) -> bool:
    for message in messages:
        content = message.get("content")
        if content.__class__ is list and any(part["type"] not in ("text", "refusal") for part in content):
            return True
    return False


def _check_tools(tools: list[JsonObject]) -> None:
    if len(tools) > MAX_TOOLS:
        _invalid(f"Maximum of {MAX_TOOLS} tools are supported, got {len(tools)}", "tools")
    for position, tool in enumerate(_convert({"tools": tools}, _Tools).tools):
        function = tool.function
        where = f"tools[{position}].function"
        if not function.name.strip():
            _invalid("Function name cannot be empty", f"{where}.name")
        if len(function.name) > 128:
            _invalid(f"Function name must not exceed 128 characters, got {len(function.name)}", f"{where}.name")
        if _TOOL_NAME.fullmatch(function.name) is None:
            _invalid(
                f"Function name may hold only letters, digits, '_' and '-', got '{function.name}'", f"{where}.name"
            )
        if function.parameters is not None and not isinstance(function.parameters, dict):
            _invalid(f"Parameters of function '{function.name}' must be a JSON object", f"{where}.parameters")
        if function.strict is True and (fault := strictness_fault(function.parameters or {})) is not None:
            _invalid(
                f"Function '{function.name}' is strict, but its parameters are not: {fault}", f"{where}.parameters"
            )


def _check_tool_choice(request: ChatRequest) -> None:
    choice = request.forced_choice
    if choice is None:
        return
    if choice == REQUIRED and request.tool_choice == "required":
        if not request.tools:
            _invalid('tool_choice is "required" but tools is empty', "tool_choice")
    elif all(tool["function"]["name"] != choice for tool in request.tools or ()):
        _invalid(f'tool named "{choice[:128]}" in tool_choice is not present in tools', "tool_choice")
    for name, _ in request.guidance.values():
        _invalid(f"`{name}` cannot be used with a forced tool_choice, which guides the whole answer itself", name)
    _check_wire("tools", request.tools)


def _check_response_format(request: ChatRequest | CompletionRequest) -> None:
    form = request.response_format
    if form is None or form.type == "text":
        return
    if form.type == "structural_tag" and not form.format and not (form.structures and form.triggers):
        _invalid(
            "response_format of type structural_tag needs `format`, or `structures` and `triggers`", "response_format"
        )
    if form.type != "json_schema":
        for name, value in (("schema", form.schema), ("value", form.value), ("format", form.format)):
            _check_wire(f"response_format.{name}", value or None)
        return
    if form.json_schema is None:
        _invalid("response_format of type json_schema needs a json_schema", "response_format.json_schema")
    if not form.json_schema.name.strip():
        _invalid("response_format.json_schema.name cannot be empty", "response_format.json_schema.name")
    if not isinstance(form.json_schema.schema, dict):
        _invalid("response_format.json_schema.schema must be a JSON object", "response_format.json_schema.schema")
    _check_wire("response_format.json_schema.schema", form.json_schema.schema)


def _check_template_controls(request: ChatRequest) -> None:
    named = (("chat_template_args", request.chat_template_args), ("chat_template_kwargs", request.chat_template_kwargs))
    for name, arguments in named:
        if arguments is not None and "chat_template" in arguments:
            _invalid("`chat_template` is not supported inside `chat_template_args`", name)
    if request.continue_final_message is True and request.add_generation_prompt is True:
        _invalid(
            "continue_final_message and add_generation_prompt cannot both be true: one continues the last message, "
            "the other starts a new one",
            "continue_final_message",
        )
    if request.mm_processor_kwargs is not None:
        _check_wire("mm_processor_kwargs", request.mm_processor_kwargs)
    if request.media_io_kwargs is not None:
        _check_wire("media_io_kwargs", request.media_io_kwargs)


def _check_not_built(request: ChatRequest) -> None:
    """Reject a request that is valid but has no implementation here, instead of answering without the missing part."""
    if request.modalities is not None and "audio" in request.modalities:
        _not_built("audio output needs an audio model", "modalities")
    if request.audio is not None:
        _not_built("audio output needs an audio model", "audio")
    if request.web_search_options is not None:
        _not_built("web_search_options needs a search tool", "web_search_options")


# -- completions --------------------------------------------------------------------------------------------------------


def _check_prompt(request: CompletionRequest) -> int:
    """Check the prompt's form; how many prompts it holds."""
    if request.prompt_embeds is not None:
        _check_embeds(request.prompt_embeds)
    prompt = request.prompt
    if not prompt:
        if request.prompt_embeds is None and request.token_data is None:
            _invalid("Prompt cannot be empty", "prompt")
        return 1
    if isinstance(prompt, str):
        return 1
    is_ids = isinstance(prompt[0], int)
    is_mixed = not _are_ids(prompt) if is_ids else len(set(map(type, prompt))) > 1
    if is_mixed:
        _invalid("Prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt")
    if is_ids:
        return 1
    for position, item in enumerate(prompt):
        if not item:
            _invalid("Prompt cannot be empty", f"prompt[{position}]")
    if len(prompt) > MAX_CHOICES:
        _invalid(f"Maximum of {MAX_CHOICES} prompts in one request, got {len(prompt)}", "prompt")
    return len(prompt)


def _are_ids(items: Sequence[Any]) -> bool:
    """Return whether integers, texts and lists are integers alone. Their sum is had in a quarter of the time of their types."""
    try:
        sum(items)
    except TypeError:
        return False
    return True


def _check_embeds(encoded: str) -> None:
    if len(encoded) > MAX_EMBEDS_BYTES * 4 // 3 + 4:
        _invalid(f"Prompt_embeds must not exceed {MAX_EMBEDS_BYTES} bytes when decoded", "prompt_embeds")
    try:
        size = len(binascii.a2b_base64(encoded, strict_mode=True))
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(400, "Validation: Prompt_embeds must be base64", param="prompt_embeds") from error
    if not MIN_EMBEDS_BYTES <= size <= MAX_EMBEDS_BYTES:
        _invalid(
            f"Prompt_embeds must be between {MIN_EMBEDS_BYTES} and {MAX_EMBEDS_BYTES} bytes when decoded, got {size}",
            "prompt_embeds",
        )


# -- rejections --------------------------------------------------------------------------------------------------------


def _check_range(label: str, value: float, low: float, high: float, param: str) -> None:
    if not low <= value <= high:
        _invalid(f"{label} must be between {low} and {high}, got {_number(value)}", param)


def _check_wire(param: str, value: Any) -> None:
    """Check a free-form value, which goes to the worker as it is: it must fit the wire (64-bit integers)."""
    if value is None:
        return
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise RequestRejected(
            400, f"Validation: {param} holds an integer that does not fit 64 bits", param=param
        ) from error


def _convert(value: dict[str, Any], type_: type[T]) -> T:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise deserialisation_error(error) from error


def _number(value: float) -> str:
    """Return 3.0 as the client most likely wrote it: 3."""
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _invalid(message: str, param: str) -> NoReturn:
    raise RequestRejected(400, f"Validation: {message}", param=param)


def _not_built(what: str, param: str) -> NoReturn:
    raise not_built(f"Validation: {what}, which this version does not have yet", param)


def _deprecated(field: str, successor: str) -> NoReturn:
    raise not_built(f"Validation: `{field}` is deprecated. Please migrate to use `{successor}` instead.", field)

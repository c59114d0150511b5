"""The requests of a client: the JSON bodies of chat and text completions as typed values.

Types here are only as narrow as the wire needs; a rule with a message of its own (`temperature` between 0 and 2) is
in `validation`. Integers are bounded to what the worker's wire can carry, so a huge one is refused with its field's name.
A request is owned by the one HTTP request it came in; only header overrides write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, cast

from msgspec import UNSET, Meta, Struct, UnsetType, field

I32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
U32: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64: TypeAlias = Annotated[int, Meta(ge=0)]  # the upper bound does not fit a Meta; `validation` holds it
U64_MAX: Final = 2**64 - 1

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]  # one that is only read

REQUIRED: Final = ""
"""The value of `ChatRequest.forced_choice` when any tool will do; no function has an empty name."""


# -- messages ----------------------------------------------------------------------------------------------------------
# The request keeps each message as the dict that was sent (a template may read keys we do not know); these types
# only judge it.


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    refusal: str


class MediaUrl(Struct):
    url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    uuid: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    image_url: MediaUrl | str | None = None
    uuid: str | None = None  # the name that an engine may keep the content under


class VideoPart(Struct, tag_field="type", tag="video_url"):
    video_url: MediaUrl | str | None = None
    uuid: str | None = None


class AudioUrlPart(Struct, tag_field="type", tag="audio_url"):
    audio_url: MediaUrl | str | None = None
    uuid: str | None = None


class AudioData(Struct):
    data: str
    format: Literal["wav", "mp3", "flac", "ogg"]


class InputAudioPart(Struct, tag_field="type", tag="input_audio"):
    input_audio: AudioData
    uuid: str | None = None


class FileData(Struct):
    file_data: str | None = None  # a data URL
    filename: str | None = None
    file_id: str | None = None


class FilePart(Struct, tag_field="type", tag="file"):
    file: FileData
    uuid: str | None = None


TextContent: TypeAlias = str | list[TextPart]
UserPart: TypeAlias = TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart | FilePart
UserContent: TypeAlias = str | list[UserPart]


class SystemMessage(Struct, tag_field="role", tag="system"):
    content: TextContent
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer"):
    content: TextContent
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    content: UserContent
    name: str | None = None


class CalledFunction(Struct):
    name: str
    # JSON text of an object, or (lenient) that object. Histories hold what models wrote: also cut or empty texts.
    arguments: Any = None


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    content: str | list[TextPart | RefusalPart] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Struct, tag_field="role", tag="tool"):
    content: UserContent
    tool_call_id: str


class FunctionMessage(Struct, tag_field="role", tag="function"):
    name: str
    content: str | None = None


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


# -- tools and output shape ---------------------------------------------------------------------------------------------


class ToolFunction(Struct):
    name: str
    description: str | None = None
    parameters: Any = None  # must be an object; `validation` reports that by the tool's name
    strict: bool | None = None


class Tool(Struct):
    function: ToolFunction
    type: Literal["function"] = "function"


class ChosenFunction(Struct):
    name: str


class AllowedTool(Struct):
    function: ChosenFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    tools: list[AllowedTool]
    mode: Literal["auto", "required"] = "auto"


class NamedToolChoice(Struct):
    """One function; or, until decoding has narrowed the tools, several that may be called."""

    function: ChosenFunction | UnsetType = UNSET
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | UnsetType = UNSET


class JsonSchemaFormat(Struct):
    name: str
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # llama.cpp and TGI write the schema of a json_object beside it, under either name.
    schema: JsonObject | UnsetType | None = UNSET
    value: JsonObject | UnsetType | None = UNSET
    # vLLM's and SGLang's structural tag, in its older form (`structures`, `triggers`) and in its newer one (`format`).
    structures: list[JsonObject] | UnsetType | None = UNSET
    triggers: list[str] | UnsetType | None = UNSET
    format: JsonObject | UnsetType | None = UNSET

    @property
    def shape(self) -> JsonObject | None:
        """The JSON schema of the whole answer; None: it is not bound to be JSON."""
        if self.type == "json_schema":
            return None if self.json_schema is None else self.json_schema.schema
        if self.type == "json_object":
            return self.schema or self.value or {"type": "object"}
        return None

    @property
    def structural_tag(self) -> JsonObject | None:
        """The structural tag of the whole answer, as engines take it; None: it has none."""
        if self.type != "structural_tag":
            return None
        if self.format:
            return {"type": "structural_tag", "format": self.format}
        return {"structures": self.structures or [], "triggers": self.triggers or []}

    def free_form(self) -> tuple[Any, ...]:
        """Return the members that may hold any JSON value, and so may nest."""
        inner = None if self.json_schema is None else self.json_schema.schema
        return (inner, self.schema, self.value, self.structures, self.format)


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's one object for all kinds of guidance. Unknown keys are refused: a constraint must not get lost."""

    json: JsonObject | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | str | None = None
    whitespace_pattern: str | None = None
    # Hints for one engine's compiler, without an effect here.
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: U32 | None = None


# -- nvext --------------------------------------------------------------------------------------------------------------


class AgentHints(Struct, forbid_unknown_fields=True):
    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None  # deprecated: stands in for a missing `priority`


class MetadataUpload(Struct, forbid_unknown_fields=True):
    url: str


class RoutingConstraints(Struct, forbid_unknown_fields=True):
    required_taints: list[str] | None = None
    preferred_taints: dict[str, float] | None = None


class RouterTargets(Struct, forbid_unknown_fields=True):
    ttft_target: float | None = None
    itl_target: float | None = None


class NvExt(Struct, forbid_unknown_fields=True):
    """Dynamo's extension object. Unknown keys are refused: a misspelt pin must not route elsewhere."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    backend_instance_id: U64 | None = None
    prefill_worker_id: U64 | None = None
    decode_worker_id: U64 | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    token_data: list[U32] | None = None
    max_thinking_tokens: U32 | None = None
    cache_salt: str | None = None
    extra_fields: list[str] | None = None
    metadata_upload: MetadataUpload | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: float | None = None
    routing_constraints: RoutingConstraints | None = None
    router: RouterTargets | None = None
    slo_ttft_ms: Annotated[int, Meta(ge=1, le=2**32 - 1)] | None = None


# -- requests -----------------------------------------------------------------------------------------------------------


class MediaPart(Struct, frozen=True):
    """One image, video or sound of a request."""

    kind: Literal["image", "video", "audio"]
    url: str | None  # None: an engine knows the content by its `uuid`
    uuid: str | None
    where: str  # what errors call it: messages[1].content[0]
    file_id: str | None = None  # an uploaded file, which `frontend/parts/media/intake` puts its content in place of
    shown: JsonObject | None = None  # where a file stood, for templates: its bytes define its kind
    is_upload: bool = False  # what the request is about, and no part of a message: its route bounds it


class RequestMedia(Struct):
    """The media of one request, in the order of its messages."""

    parts: list[MediaPart]
    messages: list[JsonObject]  # the client's own, without the content of data URLs
    on_end: Callable[[], None] | None = None  # called once when the request has ended; None: nothing is held for it
    owner: str = ""  # of the request's key, and of what is fetched for it; empty: it came without a key

    def end(self) -> None:
        """Let go of what is held for the request. Idempotent."""
        release, self.on_end = self.on_end, None
        if release is not None:
            release()


class CommonRequest(Struct, kw_only=True, dict=True):
    """The fields chat and text completions share."""

    # What decoding found, not what the client sent. Without an annotation they are no fields of the struct, so that no JSON
    # key can set them, and no worker gets them.
    unsupported = cast("tuple[str, ...]", ())  # unknown top-level keys, in order; `validation` refuses them
    ignored = cast("tuple[str, ...]", ())  # unknown top-level keys that mean nothing here (`foreign_members`)
    repaired = False  # the body was not strict JSON and was mended: worth a warning

    key_owner = cast("str | None", None)  # set on a request that came with a key: whose it is
    cache_owner = cast("str | None", None)  # of that key, unless all owners share the engines' caches
    is_large = False  # its body was long, or of many values: nothing of it is scanned on an event loop
    is_plain = False  # of a validated chat: it has none of the members that `validation.SPECIAL` names
    media = cast("RequestMedia | None", None)  # of a chat: what validation took out of its messages
    clamps_output: ClassVar[bool] = False  # an answer longer than the model's context is cut, not refused

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: I64 | None = None
    max_tokens: I64 | None = None
    stop: str | list[str | U32] | None = None
    seed: I64 | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    metadata: JsonObject | None = None
    # sampling extensions
    ignore_eos: bool | None = None
    min_tokens: U32 | None = None
    top_k: I64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: U32 | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: I32 | None = None  # into `nvext.agent_hints`, which wins
    # accepted hints without an effect on the tokens
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    nvext: NvExt | None = None
    # passed to the worker as they are
    cache_salt: str | None = None
    stop_token_ids: list[U32] | None = None
    detokenize: bool | None = None
    allowed_token_ids: list[U32] | None = None
    bad_words_token_ids: list[list[U32]] | None = None
    logprob_token_ids: list[U32] | None = None
    # of vLLM
    bad_words: list[str] | None = None
    truncate_prompt_tokens: I64 | None = None  # the last so many tokens of the prompt are kept; -1: as many as fit
    # Of the tokenizer's post-processor (`<s>`); None: for the texts of completions, not for rendered chats.
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None  # what the answer's id ends in

    def free_form(self) -> tuple[Any, ...]:
        """Return the members that may hold any JSON value, and so may nest."""
        structured = self.structured_outputs
        return (
            self.metadata,
            self.guided_json,
            *((structured.json, structured.structural_tag) if structured is not None else ()),
        )

    @property
    def guidance(self) -> dict[str, tuple[str, Any]]:
        """The explicitly requested guidance: the engine's name of each kind -> (the client's field, its value)."""
        asked: dict[str, tuple[str, Any]] = {}
        if (
            self.structured_outputs is None
            and self.guided_json is None
            and self.guided_regex is None
            and self.guided_choice is None
            and self.guided_grammar is None
            and self.guided_whitespace_pattern is None
        ):
            return asked  # nearly every request
        for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
            if (value := getattr(self, f"guided_{kind}")) not in (None, []):
                asked[kind] = (f"guided_{kind}", value)
        if (structured := self.structured_outputs) is not None:
            for kind in ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern"):
                if (value := getattr(structured, kind)) not in (None, []):
                    asked.setdefault(kind, (f"structured_outputs.{kind}", value))
            if structured.json_object is True:
                asked.setdefault("json", ("structured_outputs.json_object", {"type": "object"}))
        return asked

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def is_streaming(self) -> bool:
        return self.stream is True

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        options = self.stream_options
        return options is not None and options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream carries the usage so far."""
        options = self.stream_options
        return options is not None and options.continuous_usage_stats is True

    @property
    def annotations(self) -> list[str]:
        """Every requested annotation, those the frontend answers itself included."""
        return (self.nvext.annotations if self.nvext is not None else None) or []

    @property
    def extra_fields(self) -> list[str]:
        """The `nvext` members that the client requests in the response."""
        return (self.nvext.extra_fields if self.nvext is not None else None) or []

    @property
    def effective_cache_salt(self) -> str | None:
        """The cache namespace: `nvext` (where a header also lands) before the top level; empty is absent."""
        return (self.nvext.cache_salt if self.nvext is not None else None) or self.cache_salt or None

    @property
    def token_data(self) -> list[int] | None:
        """Prompt token ids the client supplied instead of text; an empty list is absent."""
        return (self.nvext.token_data if self.nvext is not None else None) or None


class ChatRequest(CommonRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    ends_with_result = False  # of the lowered request of another API: its last message holds the result of a tool

    messages: list[JsonObject]
    max_completion_tokens: I64 | None = None
    logprobs: bool | None = None
    top_logprobs: I64 | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: JsonObject | None = None
    web_search_options: JsonObject | None = None
    # deprecated: answered with a 422 that names the successor
    functions: Any = None
    function_call: Any = None
    prediction: JsonObject | None = None  # a hint without an effect on the tokens
    verbosity: Literal["low", "medium", "high"] | None = None  # a variable of the template
    documents: list[JsonObject] | None = None  # likewise
    # templates and reasoning
    chat_template_args: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None  # alias; `chat_template_args` wins
    thinking: bool | Thinking | None = None
    thinking_token_budget: U32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None

    def free_form(self) -> tuple[Any, ...]:
        form = self.response_format
        return (
            *super().free_form(),
            self.messages,
            self.tools,
            self.documents,
            *(() if form is None else form.free_form()),
            self.chat_template_args,
            self.chat_template_kwargs,
            self.audio,
            self.web_search_options,
            self.prediction,
            self.media_io_kwargs,
            self.mm_processor_kwargs,
            self.functions,
            self.function_call,
        )

    @property
    def forced_choice(self) -> str | None:
        """The function that must be called, `REQUIRED` for any of them, None when no call must come."""
        choice = self.tool_choice
        if choice is None:
            return None
        if isinstance(choice, NamedToolChoice):
            return None if choice.function is UNSET else choice.function.name
        return REQUIRED if choice == "required" else None

    @property
    def shape_beside_calls(self) -> JsonObject | None:
        """The JSON schema of an answer that may be calls instead; None: it has no schema, or cannot be either of the two."""
        if self.response_format is None or not self.tools or self.tool_choice not in (None, "auto"):
            return None
        return self.response_format.shape

    @property
    def fills_content(self) -> bool:
        """Whether an answer without text shows its reasoning as text, so that nothing can be shown before its end."""
        return self.template_args.get("force_nonempty_content") is True

    @property
    def output_limit(self) -> int | None:
        """The cap on generated tokens, or None. `max_completion_tokens` wins over `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_args(self) -> JsonObject:
        """The client's template variables, under either spelling."""
        return self.chat_template_args or self.chat_template_kwargs or {}

    @property
    def requested_logprobs(self) -> int | None:
        """How many alternatives per token to report; None: no log probabilities at all."""
        if self.logprobs is not True:
            return None
        return 0 if self.top_logprobs is None else self.top_logprobs


class CompletionRequest(CommonRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | U32 | list[U32]] = field(default_factory=list)
    prompt_embeds: str | None = None  # base64; stands in for the prompt
    echo: bool | None = None
    best_of: I64 | None = None
    suffix: str | None = None
    logprobs: I64 | None = None
    response_format: ResponseFormat | None = None

    def free_form(self) -> tuple[Any, ...]:
        form = self.response_format
        return (*super().free_form(), *(() if form is None else form.free_form()))

    @property
    def output_limit(self) -> int | None:
        """The cap on generated tokens, or None."""
        return self.max_tokens

    @property
    def requested_logprobs(self) -> int | None:
        """How many alternatives per token to report; None: no log probabilities at all."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return the batch, one entry per prompt: text still to be tokenised, or token ids. Call only after validation."""
        if self.token_data is not None:
            return [self.token_data]
        if not self.prompt:  # validation let this pass only beside `prompt_embeds`
            return [[]]
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # one list of ids: validation refused a mixed one
        return self.prompt  # type: ignore[return-value]  # list[str] or list[list[int]]


Request: TypeAlias = ChatRequest | CompletionRequest

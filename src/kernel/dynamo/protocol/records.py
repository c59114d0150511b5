"""What a worker publishes about its model: the card, its runtime config and the record that carries it.

The JSON is the native one to the letter. Reading is lenient, because the writer may be another version or another
system: unknown members are ignored and `null` counts as absent. A member of the wrong type is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from operator import index
from typing import Annotated, Any, Final, SupportsIndex, TypeAlias

import msgspec
from blake3 import blake3

from dynamo.errors import InvalidArgument
from dynamo.protocol.model_types import ModelType, WorkerType
from dynamo.protocol.structural_tag import check_structural_tag, complete_structural_tag

Check = Callable[[str, Any], Any]
"""(name of the field, value assigned) -> value to store."""

U16: Final = 2**16 - 1
U32: Final = 2**32 - 1
U64: Final = 2**64 - 1


def integer(highest: int, *, optional: bool = True) -> Check:
    """Accept an integer in 0..highest, also one of numpy's or torch's."""

    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if not isinstance(value, SupportsIndex):
            raise _wrong(name, value, "an integer")
        found = index(value)
        if not 0 <= found <= highest:
            raise OverflowError(f"{name} must be in 0..{highest}, got {found}")
        return found

    return check


def boolean(*, optional: bool = False) -> Check:
    """Accept a bool."""

    def check(name: str, value: Any) -> bool | None:
        if isinstance(value, bool) or (value is None and optional):
            return value
        raise _wrong(name, value, "a bool")

    return check


def text(name: str, value: Any) -> str | None:
    """Accept a str or None."""
    if value is None or isinstance(value, str):
        return value
    raise _wrong(name, value, "a str or None")


def number(name: str, value: Any) -> float | None:
    """Accept a real number or None."""
    if value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    raise _wrong(name, value, "a number or None")


def choice(*words: str) -> Check:
    """Accept one of `words`, None, or an empty text for None."""

    def check(name: str, value: Any) -> str | None:
        found = text(name, value) or None
        if found is not None and found not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
        return found

    return check


def text_mapping(name: str, value: Any) -> dict[str, str]:
    """Accept a mapping of str to str."""
    if isinstance(value, Mapping) and all(isinstance(part, str) for entry in value.items() for part in entry):
        return dict(value)
    raise _wrong(name, value, "a dict of str to str")


def text_set(name: str, value: Any) -> set[str]:
    """Accept a set of str."""
    if isinstance(value, set | frozenset) and all(isinstance(entry, str) for entry in value):
        return set(value)
    raise _wrong(name, value, "a set of str")


def _wrong(name: str, value: Any, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {value!r:.100} ({type(value).__name__})")


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a stranger's bytes may raise: no JSON of the right shape, no UTF-8, or nested without end."""

_SLUG_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")

DEFAULT_BLOCK_SIZE: Final = 16
"""The card's value when the engine has no block-structured KV: the native reader requires the member. Whether the
engine really has blocks is in `runtime_config.total_kv_blocks` and its event channels, not by this number."""


ENCODER_HANDOFF: Final = "encoder_result_handoff"
"""The entry of a worker's `runtime_data` that requires an encode worker before it: the media of a request go there first."""

MEDIA_KINDS: Final = "media"
"""The entry of an engine's `runtime_data` that lists the kinds of media it takes: `image`, `video`, `audio`; an empty list: none.
Without it the model's config.json decides."""

ADAPTERS_ENDPOINT: Final = "adapters"
"""The endpoint of a component at which frontends load and unload the adapters of its workers."""

LABELS: Final = "labels"
"""The entry of an engine's `runtime_data` with the names of the classes that its model knows, in their order."""

IMAGE_PROCESSOR: Final = "image_processor"
"""The entry of a worker's `runtime_data` with what its model's preprocessor_config.json defines of the sizes of images: that is no
file of a card."""

IMAGE_PROCESSOR_MEMBERS: Final[tuple[str, ...]] = (
    "image_processor_type", "patch_size", "merge_size", "min_pixels", "max_pixels", "size",
)  # fmt: skip

CHAT_TEMPLATES: Final = "chat_templates"
"""The entry of a worker's `runtime_data` with the files of further chat templates of its model, by name: `tool_use` is for
requests with tools."""
MAX_CHAT_TEMPLATES: Final = 16  # the models that have some have two or three

TAKES_FETCH_HINTS: Final = "router_hint"
FETCH_WORKER_TYPE: Final = "router_hint_worker_type"
FETCH_ENDPOINTS: Final = "router_hint_source_control_endpoints"
"""The entries of an engine's `runtime_data` about blocks that its workers fetch from each other: true where it takes hints;
`aggregated`, `prefill` or `decode`; and where each rank gives its blocks, {"data-parallel rank": "tcp://host:port"}."""

RESUMES_GUIDED: Final = "resumes_guided_decoding"
"""The entry of an engine's `runtime_data` that declares: for a request that lost its worker it brings the grammar up to
date with what was generated, the tokens behind `Context.prompt_tokens`. An engine that does not would begin the
grammar anew.
"""


def slugify(name: str) -> str:
    """Return the form of a model name that keys, file names and URLs use (`/a/M.1` -> `a_m_1`)."""
    return "".join(c if c in _SLUG_CHARS else "_" for c in name.lower()).lstrip("_")


class FileRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a model: where it is, and what it must hash to."""

    path: str  # a local path, or an http URL on the worker's status server
    checksum: str  # "blake3:" and 64 hex digits
    size: int | None = None  # bytes


class LoraRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The adapter a card stands for."""

    name: str
    max_gpu_lora_count: int | None = None
    source: str | None = None  # where it is from, if a frontend manages it: workers that come later get it from there


Count: TypeAlias = Annotated[int, msgspec.Meta(le=2**63 - 1)]  # JSON knows no bound, gauges and the wire do
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
FirstRank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=U32)]
RankCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=4096)]  # a router keeps an account of every one of them


class ModelRuntimeConfig(msgspec.Struct, kw_only=True):
    """What the engine found out about itself at start-up. None and empty members are not published.

    Assigning to a field checks the value, and the error names the field. Reading a foreign card does not.
    """

    context_length: Count | None = None  # tokens
    total_kv_blocks: Size | None = None  # per data-parallel rank
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tool_call_arguments_format: str = "json_string"
    structural_tag_mode: str = "off"
    structural_tag_scope: str = "auto"
    structural_tag_schema: str = "auto"
    exclude_tools_when_tool_choice_none: bool = True
    data_parallel_start_rank: FirstRank = 0
    data_parallel_size: RankCount = 1
    enable_local_indexer: bool = True
    enable_eagle: bool = False
    tokenizer_backend: str | None = None
    tokenizer_fallback_enabled: bool | None = None
    structural_tag: Any = None
    kv_event_publishing_enabled: bool | None = None
    kv_event_source_mode: str | None = None
    kv_state_endpoint: Any = None
    runtime_data: dict[str, Any] = {}
    disaggregated_endpoint: dict[str, Any] | None = None  # {"bootstrap_host": str, "bootstrap_port": int}
    taints: set[str] = set()
    stable_routing_id: str | None = None
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    max_gpu_lora_count: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Store a field after its check."""
        check = _RUNTIME_CONFIG_CHECKS.get(name)
        super().__setattr__(name, value if check is None else check(name, value))

    @property
    def ranks(self) -> range:
        """Its data-parallel ranks."""
        start = self.data_parallel_start_rank
        return range(start, start + max(1, self.data_parallel_size))

    @property
    def bootstrap_host(self) -> str | None:
        """Where decode peers bootstrap, or None."""
        return (self.disaggregated_endpoint or {}).get("bootstrap_host")

    @property
    def bootstrap_port(self) -> int | None:
        """The port of `bootstrap_host`, or None."""
        return (self.disaggregated_endpoint or {}).get("bootstrap_port")

    def set_engine_specific(self, key: str, value: Any) -> None:
        """Add one entry to `runtime_data`. A str that is JSON is stored as the value it spells."""
        if isinstance(value, str):
            with suppress(msgspec.DecodeError):  # a plain text stays one
                value = msgspec.json.decode(value)
        self.runtime_data[key] = value

    def get_engine_specific(self, key: str) -> Any:
        """Return one entry of `runtime_data`, or None."""
        return self.runtime_data.get(key)

    def set_structural_tag(self, structural_tag: Mapping[str, Any] | None = None) -> None:
        """Advertise a policy of structural tags, completed with its defaults. Raises ValueError naming the wrong member."""
        self.structural_tag = complete_structural_tag(structural_tag)

    def set_disaggregated_endpoint(self, bootstrap_host: str | None = None, bootstrap_port: int | None = None) -> None:
        """Advertise where decode peers bootstrap; published only when both are given."""
        host = text("bootstrap_host", bootstrap_host)
        port = integer(U16)("bootstrap_port", bootstrap_port)
        self.disaggregated_endpoint = (
            None if host is None or port is None else {"bootstrap_host": host, "bootstrap_port": port}
        )

    def to_json(self) -> dict[str, Any]:
        """Return the members as the card carries them."""
        record = _without_nothing(msgspec.to_builtins(self))
        if self.taints:
            record["taints"] = sorted(self.taints)
        return record


def _check_tag(name: str, value: Any) -> Any:
    check_structural_tag(value)
    return value


_RUNTIME_CONFIG_CHECKS: Final[Mapping[str, Check]] = {
    "context_length": integer(U32),
    "total_kv_blocks": integer(U64),
    "max_num_seqs": integer(U64),
    "max_num_batched_tokens": integer(U64),
    "max_gpu_lora_count": integer(U32),
    "data_parallel_start_rank": integer(U32, optional=False),
    "data_parallel_size": integer(U32, optional=False),
    "tool_call_parser": text,
    "reasoning_parser": text,
    "exclude_tools_when_tool_choice_none": boolean(),
    "enable_local_indexer": boolean(),
    "enable_eagle": boolean(),
    "kv_event_publishing_enabled": boolean(optional=True),
    "kv_event_source_mode": text,
    "kv_state_endpoint": text,
    "kv_transfer_domain": text,
    "kv_transfer_enforcement": choice("required", "preferred"),
    "kv_transfer_preferred_weight": number,
    "stable_routing_id": text,
    "structural_tag": _check_tag,
    "taints": text_set,
    "tokenizer_backend": choice("default", "fastokens", "basetenkenizer"),
    "topology_domains": text_mapping,
}


class ModelCard(msgspec.Struct, kw_only=True):
    """The model deployment card (`card_json`): everything a frontend needs to serve a model it has never seen.

    A card without files is a name-only card: the frontend serves it with the built-in byte tokenizer.
    """

    display_name: str
    slug: str = ""  # filled from `display_name` when absent
    source_path: str = ""  # hub id or path, as the operator gave it
    # Each artefact is one file under the name of its kind, e.g. {"hf_tokenizer_json": FILE}.
    model_info: dict[str, Any] | None = None
    tokenizer: dict[str, Any] | None = None
    prompt_formatter: dict[str, Any] | None = None
    chat_template_file: dict[str, Any] | None = None  # overrides the template of `prompt_formatter`
    gen_config: dict[str, Any] | None = None
    prompt_context: list[str] | None = None
    extra_files: list[Any] = []
    architectural_max_context_length: int | None = None  # tokens, what the weights were made for
    context_length: Count = 0  # tokens, the effective limit; 0: not known
    kv_cache_block_size: Size = DEFAULT_BLOCK_SIZE
    migration_limit: Count = 0
    model_type: str = ""  # "Chat | Completions"; empty: no OpenAI surface
    model_input: str = "Tokens"
    worker_type: str | None = None  # absent on old workers
    needs: list[list[str]] = []  # alternatives of roles that must also be present
    lora: LoraRecord | None = None
    aliases: list[str] = []
    user_data: Any = None
    tensor_model_config: Any = None
    router_config: Any = None
    indexer_identity: Any = None
    media_decoder: Any = None
    media_fetcher: Any = None
    runtime_config: ModelRuntimeConfig = msgspec.field(default_factory=ModelRuntimeConfig)

    def __post_init__(self) -> None:
        if not self.slug:
            self.slug = slugify(self.display_name)

    @property
    def surfaces(self) -> ModelType:
        """The OpenAI surfaces; the legacy prefill marker is no surface."""
        return ModelType.from_card(self.model_type) & ~ModelType.Prefill

    @property
    def role(self) -> WorkerType:
        """The worker's role, inferred from the legacy marker where an old worker does not report it.

        Raises InvalidArgument for a role this version does not know: such a worker cannot be placed.
        """
        if self.worker_type:
            return WorkerType.from_card(self.worker_type)
        return (
            WorkerType.Prefill if ModelType.Prefill in ModelType.from_card(self.model_type) else WorkerType.Aggregated
        )

    @property
    def is_name_only(self) -> bool:
        """Whether the card names no files at all."""
        return next(iter(self.files()), None) is None

    def files(self) -> Iterable[tuple[str, FileRef]]:
        """Return (kind, file) of every artefact, e.g. ("hf_tokenizer_json", FILE); malformed ones are an InvalidArgument."""
        for name in _ARTEFACTS:
            for kind, value in (getattr(self, name) or {}).items():
                yield kind, _file_ref(f"{name}.{kind}", value)
        for name, ref in self.named_templates().items():
            yield f"{CHAT_TEMPLATES}.{name}", ref

    def file(self, kind: str) -> FileRef | None:
        """Return the file of one kind, wherever it stands in the card."""
        return next((ref for found, ref in self.files() if found == kind), None)

    def template_file(self) -> tuple[str, FileRef] | None:
        """Return (kind, file) of the chat template that overrides the one in `prompt_formatter`, if there is one.

        The kind `hf_chat_template_jinja` is the template's text, `hf_chat_template_json` holds it as `chat_template`.
        """
        for kind, value in (self.chat_template_file or {}).items():
            return kind, _file_ref(f"chat_template_file.{kind}", value)
        return None

    def named_templates(self) -> dict[str, FileRef]:
        """Return the files of the chat templates besides the default one. Raises InvalidArgument for malformed ones."""
        given = self.runtime_config.runtime_data.get(CHAT_TEMPLATES, {})
        if not isinstance(given, dict) or len(given) > MAX_CHAT_TEMPLATES:
            raise InvalidArgument(
                f"model card: {CHAT_TEMPLATES} must be an object of at most {MAX_CHAT_TEMPLATES} files"
            )
        return {name: _file_ref(f"{CHAT_TEMPLATES}.{name}", value) for name, value in given.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the card as it is published; absent members are left out."""
        record = _without_nothing(msgspec.to_builtins(self, str_keys=True))
        # The native reader requires these three even when they are empty.
        record["media_decoder"] = self.media_decoder
        record["media_fetcher"] = self.media_fetcher
        record["runtime_config"] = self.runtime_config.to_json()
        record["needs"] = self.needs
        record["model_type"] = self.model_type
        return record

    def encode(self) -> bytes:
        return msgspec.json.encode(self.to_json())

    def checksum(self) -> str:
        """Return the fingerprint that workers of one model must share: 64 hex digits.

        Inside: everything that changes what a request means (files by content, block size, role, needs). Outside: what
        may differ between replicas (context length, migration limit, where the files lie) and what may change while
        serving (taints).
        """
        identity = {
            "display_name": self.display_name,
            "files": sorted([kind, ref.checksum] for kind, ref in self.files()),
            "prompt_context": self.prompt_context or [],
            "kv_cache_block_size": self.kv_cache_block_size,
            "model_type": self.model_type,
            "model_input": self.model_input,
            "worker_type": str(self.role),
            "needs": self.needs,
            "lora": self.lora.name if self.lora else None,
        }
        return blake3(msgspec.json.encode(identity)).hexdigest()


_ARTEFACTS: Final = ("model_info", "tokenizer", "prompt_formatter", "chat_template_file", "gen_config")


class ModelRecord(msgspec.Struct, kw_only=True, tag_field="type", tag="Model", omit_defaults=True):
    """A record of the bucket `v1/mdc`: one model at one instance."""

    namespace: str
    component: str
    endpoint: str
    instance_id: int  # u64; may exceed 2**53, so never a float
    card_json: dict[str, Any]
    model_suffix: str | None = None  # the adapter's slug

    @property
    def key(self) -> str:
        """The key inside `v1/mdc`."""
        base = f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id:x}"
        return f"{base}/{self.model_suffix}" if self.model_suffix else base

    @property
    def card(self) -> ModelCard:
        """The card, decoded. Raises InvalidArgument naming the member that is wrong."""
        return decode_card(self.card_json)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_RECORD_DECODER: Final = msgspec.json.Decoder(ModelRecord)


def decode_model_record(data: bytes) -> ModelRecord:
    """Read a value of `v1/mdc`; its card is checked at first use. Raises InvalidArgument."""
    try:
        return _RECORD_DECODER.decode(data)
    except UNREADABLE as error:
        raise InvalidArgument(f"model record is malformed: {error}") from error


def decode_card(source: bytes | str | dict[str, Any]) -> ModelCard:
    """Read a card from JSON or from its decoded form. Raises InvalidArgument naming the member that is wrong."""
    try:
        raw = msgspec.json.decode(source, type=dict[str, Any]) if isinstance(source, bytes | str) else source
        present = {key: value for key, value in raw.items() if value is not None}
        runtime = present.get("runtime_config")
        if isinstance(runtime, dict):
            present["runtime_config"] = {key: value for key, value in runtime.items() if value is not None}
        return msgspec.convert(present, ModelCard)
    except UNREADABLE as error:
        raise InvalidArgument(f"model card is malformed: {error}") from error


def _file_ref(where: str, value: Any) -> FileRef:
    if isinstance(value, dict) and "file" in value:
        value = value["file"]  # template artefacts wrap their file
    try:
        return msgspec.convert(value, FileRef)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"model card: {where} is no file reference: {error}") from error


def _without_nothing(record: Any) -> dict[str, Any]:
    """Drop None and empty containers; a false, a zero and an empty text carry meaning and stay."""
    return {key: value for key, value in record.items() if value is not None and value not in ([], {}, set())}

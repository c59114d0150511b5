"""What `start()` returns: the model's name and the capacities the router may count on."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, fields
from operator import index
from typing import Any, Final, SupportsIndex

from dynamo.errors import InvalidArgument


@dataclass
class LlmRegistration:
    """The token-pipeline half of an `EngineConfig`, as the native system nests it. None: do not advertise."""

    context_length: int | None = None
    """Tokens of prompt and completion together."""
    kv_cache_block_size: int | None = None
    """Tokens per KV block. None: no block-structured cache, so no KV-aware routing."""
    total_kv_blocks: int | None = None
    """KV blocks of one data-parallel rank."""
    max_num_seqs: int | None = None
    """Sequences that one step of the engine can hold."""
    max_num_batched_tokens: int | None = None
    """Tokens that one step of the engine can compute."""
    data_parallel_size: int | None = None
    """Data-parallel ranks hosted by this worker. None: 1."""
    data_parallel_start_rank: int | None = None
    """First data-parallel rank of this worker. None: 0."""
    bootstrap_host: str | None = None
    """Where decode workers reach this prefill worker. Advertised only together with the port."""
    bootstrap_port: int | None = None
    """Port of `bootstrap_host`."""
    enable_eagle: bool = False
    """Whether the engine drafts tokens with EAGLE, which changes how KV blocks are hashed."""
    max_gpu_lora_count: int | None = None
    """LoRA adapters that fit on the device at once."""


_LLM_FIELDS: Final = tuple(entry.name for entry in fields(LlmRegistration))


class _Itself:
    """Reads as the object it is read from, and as None on the class."""

    def __get__(self, instance: EngineConfig | None, owner: type | None = None) -> EngineConfig | None:
        return instance


@dataclass(init=False)
class EngineConfig:
    """What the worker advertises. None always means "do not advertise".

    Flat fields are the canonical form. `llm=LlmRegistration(...)` fills the flat fields that are unset and reads back
    as a view. In `dataclasses.replace(config, llm=...)` the new half takes the place of the old one.
    """

    model: str
    """Canonical identifier of the model; not empty."""
    served_model_name: str | None
    """The advertised name. None: `model`."""
    context_length: int | None
    """Tokens of prompt and completion together."""
    kv_cache_block_size: int | None
    """Tokens per KV block. None: no block-structured cache, so no KV-aware routing."""
    total_kv_blocks: int | None
    """KV blocks of one data-parallel rank."""
    max_num_seqs: int | None
    """Sequences that one step of the engine can hold."""
    max_num_batched_tokens: int | None
    """Tokens that one step of the engine can compute."""
    data_parallel_size: int | None
    """Data-parallel ranks hosted by this worker. None: 1."""
    data_parallel_start_rank: int | None
    """First data-parallel rank of this worker. None: 0. The ranks are [start, start + size)."""
    bootstrap_host: str | None
    """Where decode workers reach this prefill worker. Advertised only together with the port."""
    bootstrap_port: int | None
    """Port of `bootstrap_host`."""
    runtime_data: dict[str, Any]
    """Further facts, JSON values by name; copied into the model card's runtime configuration."""
    model_aliases: list[str]
    """Further names that clients may use for this model."""
    enable_eagle: bool
    """Whether the engine drafts tokens with EAGLE, which changes how KV blocks are hashed."""
    max_gpu_lora_count: int | None
    """LoRA adapters that fit on the device at once."""
    _nested: bool = field(init=False, repr=False, compare=False)  # an `llm` was passed, even an empty one
    # `dataclasses.replace` passes what each field reads as. This one reads as the config that is being replaced, which
    # lets the constructor distinguish a new value from an old one.
    _replaced: InitVar[EngineConfig | None] = _Itself()

    def __init__(
        self,
        model: str,
        served_model_name: str | None = None,
        context_length: int | dict[str, Any] | None = None,
        kv_cache_block_size: int | None = None,
        total_kv_blocks: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        data_parallel_size: int | None = None,
        data_parallel_start_rank: int | None = None,
        bootstrap_host: str | None = None,
        bootstrap_port: int | None = None,
        runtime_data: dict[str, Any] | None = None,
        model_aliases: list[str] | None = None,
        *,
        llm: LlmRegistration | None = None,
        enable_eagle: bool = False,
        max_gpu_lora_count: int | None = None,
        _replaced: EngineConfig | None = None,
    ) -> None:
        if isinstance(context_length, dict):
            # The native class has `runtime_data` in third place, so a dict there can mean nothing else.
            if runtime_data is not None:
                raise TypeError("EngineConfig got runtime_data twice: in third place and by keyword")
            context_length, runtime_data = None, context_length
        self.model = model
        self.served_model_name = served_model_name
        self.context_length = context_length
        self.kv_cache_block_size = kv_cache_block_size
        self.total_kv_blocks = total_kv_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.data_parallel_size = data_parallel_size
        self.data_parallel_start_rank = data_parallel_start_rank
        self.bootstrap_host = bootstrap_host
        self.bootstrap_port = bootstrap_port
        self.runtime_data = {} if runtime_data is None else runtime_data
        self.model_aliases = [] if model_aliases is None else model_aliases
        self.enable_eagle = enable_eagle
        self.max_gpu_lora_count = max_gpu_lora_count
        self._nested = llm is not None or (_replaced is not None and _replaced._nested)
        if llm is not None:
            if _replaced is not None:
                self._forget(_replaced)
            self._fill_from(llm)

    def _forget(self, previous: EngineConfig) -> None:
        """Unset the token-pipeline fields that still have the values of `previous`."""
        for entry in fields(LlmRegistration):
            if getattr(self, entry.name) == getattr(previous, entry.name):
                setattr(self, entry.name, entry.default)

    def _fill_from(self, llm: LlmRegistration) -> None:
        for name in _LLM_FIELDS:
            flat, nested = getattr(self, name), getattr(llm, name)
            if nested is not None and (flat is None or flat is False):  # not `not flat`: an explicit 0 is a value
                setattr(self, name, nested)

    @property
    def llm(self) -> LlmRegistration | None:
        """Return the token-pipeline fields as the native system nests them; None when there are none (raw engines)."""
        view = LlmRegistration(**{name: getattr(self, name) for name in _LLM_FIELDS})
        return view if self._nested or view != LlmRegistration() else None

    def resolve_served_name(self, override: str | None = None) -> str:
        """Return the advertised name: the worker's override, else this engine's served name, else its model name."""
        return override or self.served_model_name or self.model


_MISSING: Final = object()
_U16: Final = 2**16 - 1
_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1

# field -> (lowest, highest) value that the card can carry
_INTEGERS: Final = {
    "context_length": (1, _U32),
    "kv_cache_block_size": (1, _U32),
    "total_kv_blocks": (0, _U64),
    "max_num_seqs": (0, _U64),
    "max_num_batched_tokens": (0, _U64),
    "data_parallel_size": (1, _U32),
    "data_parallel_start_rank": (0, _U32),
    "bootstrap_port": (0, _U16),
    "max_gpu_lora_count": (0, _U32),
}


def read_engine_config(source: object) -> EngineConfig:
    """Check what `start()` returned and give it the one shape the worker uses.

    Any object with a `model` will do; absent optional attributes are unset. Raises InvalidArgument naming the field
    when a value is of the wrong type: dropping it would switch a feature off without a word. An attribute that raises
    anything but AttributeError lets that error through.
    """
    if getattr(source, "model", _MISSING) is _MISSING:
        raise InvalidArgument(f"start() must return an EngineConfig, got {type(source).__name__} (no `model`)")
    config = EngineConfig(
        _text(source, "model", required=True) or "",
        _text(source, "served_model_name"),
        bootstrap_host=_text(source, "bootstrap_host"),
        runtime_data=_mapping(source, "runtime_data"),
        model_aliases=_texts(source, "model_aliases"),
        enable_eagle=_flag(source, "enable_eagle"),
        **{name: _integer(source, name) for name in _INTEGERS},
    )
    # A config of ours has already merged its nested half; one of another making may hold only that.
    nested = None if isinstance(source, EngineConfig) else getattr(source, "llm", None)
    if nested is not None:
        config._nested = True
        config._fill_from(
            LlmRegistration(
                bootstrap_host=_text(nested, "bootstrap_host"),
                enable_eagle=_flag(nested, "enable_eagle"),
                **{name: _integer(nested, name) for name in _INTEGERS},
            )
        )
    elif isinstance(source, EngineConfig):
        config._nested = source._nested
    return config


def _wrong(name: str, value: object, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"EngineConfig.{name} must be {wanted} or None, got {value!r} ({type(value).__name__})")


def _text(source: object, name: str, *, required: bool = False) -> str | None:
    value = getattr(source, name, None)
    if isinstance(value, str) or (value is None and not required):
        return value
    raise _wrong(name, value, "a str")


def _integer(source: object, name: str) -> Any:
    value = getattr(source, name, None)
    if value is None:
        return None
    low, high = _INTEGERS[name]
    # `index` also accepts the integers of numpy and torch, and refuses floats and text.
    number = None if isinstance(value, bool) or not isinstance(value, SupportsIndex) else index(value)
    if number is None or not low <= number <= high:
        raise _wrong(name, value, f"an int in {low}..{high}")
    return number


def _flag(source: object, name: str) -> bool:
    value = getattr(source, name, None)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, value, "a bool")
    return value


def _mapping(source: object, name: str) -> dict[str, Any] | None:
    value = getattr(source, name, None)
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, "a dict with str keys")
    return dict(value)


def _texts(source: object, name: str) -> list[str] | None:
    value = getattr(source, name, None)
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(entry, str) for entry in value):
        raise _wrong(name, value, "a list of str")
    return list(value)

"""The content of `config.json`, checked and typed: the shape of a Llama-family decoder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo.contract.requests.json_files import read_object
from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.reference.picture_codes import Vision, known_tokens, read_picture_codes
from dynamo.reference.vision import COLOURS, ColourGrid

ARCHITECTURES: Final = tuple(
    f"{family}{kind}"
    for kind in ("ForCausalLM", "Model", "ForSequenceClassification")
    for family in ("Llama", "Qwen2", "Qwen3")
)
MAX_LABELS: Final = 4096
MAX_ROUGH_SIZE: Final = 2**31 - 1  # no dimension of a real model comes near it; a typo may


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are stretched beyond the trained length."""

    kind: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0  # the last three are for llama3
    high_freq_factor: float = 4.0
    original_context: int = 8192  # positions


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's author set for a request that is silent. These change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NO_DEFAULTS: Final = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions of one model; everything the forward pass needs beside the weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    context_length: int  # positions the model was made for
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = NO_DEFAULTS
    labels: tuple[str, ...] = ()  # of a model that classifies
    vision: Vision | None = None  # None: it sees nothing

    @property
    def has_head(self) -> bool:
        """Whether it can generate the next token."""
        return self.architecture.endswith("ForCausalLM")

    @property
    def known_tokens(self) -> int:
        """How many tokens it has a vector for: its vocabulary, and the codes of pictures behind it."""
        return known_tokens(self.vocab_size, self.vision)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


def read_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` and, where there is one, `generation_config.json`.

    Raises InvalidArgument naming the file and the field for what is missing, wrong, or not supported.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"there is no directory {directory}; --model must name one with config.json in it")
    if not (directory / "config.json").is_file():
        raise InvalidArgument(
            f"{directory} has no config.json; give the directory of a model in the HuggingFace layout (config.json, "
            "tokenizer.json, *.safetensors)"
        )
    source = _Fields(directory / "config.json", read_object(directory / "config.json"))
    architectures = source.values.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if architecture not in ARCHITECTURES:
        raise source.wrong("architectures", architecture, f"one of {', '.join(ARCHITECTURES)}")
    source.only("hidden_act", "silu")
    source.only("use_sliding_window", False)
    heads = source.integer("num_attention_heads")
    kv_heads = source.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise source.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    hidden = source.integer("hidden_size")
    is_qwen2, is_qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    head_dim = source.integer("head_dim", 128 if is_qwen3 else max(hidden // heads, 1))
    if head_dim % 2:
        raise source.wrong("head_dim", head_dim, "even, because rotary embeddings turn pairs")
    attention_bias = source.flag("attention_bias", False)
    # Newer files keep theta and the scaling in one `rope_parameters`.
    rope = source.values.get("rope_parameters") or source.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise source.wrong("rope_scaling", rope, "an object")
    rope_fields = _Fields(source.path, rope)
    theta = rope_fields.number("rope_theta", source.number("rope_theta", 10_000.0))
    vocab = source.integer("vocab_size")
    bos, eos = _special_tokens(directory, source)
    for name, ids in (("bos_token_id", [] if bos is None else [bos]), ("eos_token_id", eos)):
        if any(not 0 <= token < vocab for token in ids):
            raise source.wrong(name, ids, f"below vocab_size ({vocab})")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=source.integer("intermediate_size"),
        layers=source.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=source.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=_rope_scaling(rope_fields),
        tied_embeddings=source.flag("tie_word_embeddings", False) or not architecture.endswith("ForCausalLM"),
        qkv_bias=is_qwen2 or attention_bias,
        output_bias=attention_bias and not is_qwen2,
        mlp_bias=source.flag("mlp_bias", False),
        qk_norm=is_qwen3,
        context_length=source.integer("max_position_embeddings", 2048),
        bos_token_id=bos,
        eos_token_ids=tuple(eos),
        sampling=_sampling_defaults(directory),
        labels=_labels(source) if architecture.endswith("ForSequenceClassification") else (),
        vision=_vision(source, vocab, directory),
    )


def _vision(source: _Fields, vocab: int, directory: Path) -> Vision | None:
    """Read `vision_config` (`{"model_type": "colour_grid" or "picture_codes", "first_token_id": N}`) and `image_token_id`."""
    found = source.values.get("vision_config")
    if found is None:
        return None
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(found, dict) or kind not in ("colour_grid", "picture_codes"):
        raise source.wrong("vision_config", found, "of the model_type colour_grid or picture_codes")
    fields = _Fields(source.path, found)
    first, image = fields.integer("first_token_id"), source.token("image_token_id", vocab)
    if kind == "picture_codes":
        if first != vocab:
            raise fields.wrong("first_token_id", first, f"vocab_size ({vocab}): the codes are behind all words")
        return read_picture_codes(directory, image_token_id=image, first_token_id=first)
    if first + COLOURS > vocab:
        raise source.wrong(
            "vision_config.first_token_id", first, f"at most {vocab - COLOURS}, as there are {COLOURS} colours"
        )
    return ColourGrid(image, first)


@dataclass(frozen=True)
class _Fields:
    """Typed access to one JSON object; every complaint names the file and the field."""

    path: Path
    values: JsonObject

    def wrong(self, name: str, value: object, wanted: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: {name} must be {wanted}, got {value!r}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_ROUGH_SIZE:
            raise self.wrong(name, value, "an integer above 0")
        return value

    def token(self, name: str, vocab: int) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
            raise self.wrong(name, value, f"a token, at least 0 and below vocab_size ({vocab})")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def only(self, name: str, supported: object) -> None:
        value = self.values.get(name)
        if value is not None and value != supported:
            raise self.wrong(name, value, f"{json.dumps(supported)} (nothing else is supported)")


def _rope_scaling(fields: _Fields) -> RopeScaling | None:
    kind = fields.values.get("rope_type") or fields.values.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", fields.number("factor"))
    if kind != "llama3":
        raise fields.wrong("rope_type", kind, "default, linear or llama3")
    scaling = RopeScaling(
        "llama3",
        fields.number("factor"),
        fields.number("low_freq_factor"),
        fields.number("high_freq_factor"),
        fields.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.wrong("high_freq_factor", scaling.high_freq_factor, "above low_freq_factor")
    return scaling


def _special_tokens(directory: Path, source: _Fields) -> tuple[int | None, list[int]]:
    """Return (bos, eos ids). The generation config wins over the model config: it lists every end-of-turn token."""
    values = source.values
    generation = directory / "generation_config.json"
    if generation.is_file():
        values = {**values, **{k: v for k, v in read_object(generation).items() if v is not None}}
    bos, eos = values.get("bos_token_id"), values.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in (*eos, 0 if bos is None else bos)):
        raise source.wrong("bos_token_id and eos_token_id", (bos, eos), "integers")
    return bos, eos


def _labels(source: _Fields) -> tuple[str, ...]:
    """Return the names of the classes; LABEL_0, LABEL_1 where the file has only their number, as its library has it."""
    names = source.values.get("id2label")
    if names is None:
        count = source.integer("num_labels", 2)
        if count > MAX_LABELS:
            raise source.wrong("num_labels", count, f"at most {MAX_LABELS}")
        return tuple(f"LABEL_{number}" for number in range(count))
    if (
        not isinstance(names, dict)
        or not 0 < len(names) <= MAX_LABELS
        or {str(n) for n in range(len(names))} != set(names)
    ):
        raise source.wrong("id2label", names, f"an object with the members 0, 1, ..., at most {MAX_LABELS} of them")
    return tuple(str(names[str(number)]) for number in range(len(names)))


def _sampling_defaults(directory: Path) -> SamplingDefaults:
    path = directory / "generation_config.json"
    if not path.is_file():
        return NO_DEFAULTS
    fields = _Fields(path, read_object(path))

    def within(name: str, default: float, low: float, high: float) -> float:
        value = fields.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise fields.wrong(name, value, f"a number from {low} to {high}")
        return float(value)

    is_greedy = fields.values.get("do_sample") is False
    return SamplingDefaults(
        temperature=0.0 if is_greedy else within("temperature", 1.0, 0.0, 100.0),
        top_p=within("top_p", 1.0, 1e-9, 1.0),
        top_k=int(within("top_k", 0, -1, 2**31 - 1)),
        min_p=within("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=within("repetition_penalty", 1.0, 1e-9, 100.0),
    )

"""Everything text about one model, read from its directory: tokenizer, template, end tokens, context length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.responses import ChatLogprobPieces
from dynamo.protocol.openai.shapes import JsonMapping
from dynamo.text.control_tokens import ControlTokens
from dynamo.text.prefix_cache import CachedTokenizer
from dynamo.text.quick_encoder import OWN_ENCODER, TokenizerChoice
from dynamo.text.template_budget import NO_CLOCK, BudgetSpec
from dynamo.text.templates import PLAIN_TEMPLATE, ChatTemplate
from dynamo.text.tokenizer import (
    BatchTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    read_json_object,
    special_tokens,
)

# What a model's files define of media: which kinds it takes, which token stands for an image, and how many tokens one becomes.
#
# The counts are for routing and for usage; the engine decides what an image really becomes. A further family is a function here
# and a row of `_FAMILIES`.

ImageCounter = Callable[[int, int], "int | None"]
"""Return how many tokens an image of this width and height becomes; None: the model does not take such an image."""

GRID_PROCESSOR: Final = "ColourGridProcessor"
CODES_PROCESSOR: Final = "PictureCodesProcessor"
"""The image processors of the reference engine: every image is 4 x 4 colours, or sixteen codes, a token each."""

_GRID_TOKENS: Final = 16
_MAX_ASPECT: Final = 200  # width to height or the reverse, of the Qwen2-VL family

# The members of config.json that give a kind away.
_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("image_token_id", "image_token_index", "vision_config", "img_processor"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index", "audio_config"),
}


class MediaTokens(Struct, frozen=True):
    """What is known of the media of one model."""

    kinds: frozenset[str] = frozenset()  # image, video, audio
    image_token_id: int | None = None  # stands once for each image of a rendered prompt; None: not known
    count_image: ImageCounter | None = None  # None: of no family that is known here


NO_MEDIA: Final = MediaTokens()


def media_tokens(config: JsonMapping, preprocessor: JsonMapping) -> MediaTokens:
    """Read what config.json and preprocessor_config.json (empty: it is not there) define of media."""
    kinds = frozenset(kind for kind, signs in _SIGNS.items() if any(config.get(sign) is not None for sign in signs))
    if "image" not in kinds:
        return MediaTokens(kinds)
    token_id = next((found for sign in _SIGNS["image"][:2] if _is_id(found := config.get(sign))), None)
    family = preprocessor.get("image_processor_type") if preprocessor else None
    make = _FAMILIES.get(family) if isinstance(family, str) else None
    return MediaTokens(kinds, token_id, None if make is None else make(config, preprocessor))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _qwen2_vl(config: JsonMapping, preprocessor: JsonMapping) -> ImageCounter | None:
    size = preprocessor.get("size")
    named: JsonMapping = size if isinstance(size, Mapping) else {}
    patch = _positive(preprocessor.get("patch_size"), 14)
    merge = _positive(preprocessor.get("merge_size"), 2)
    least = _positive(preprocessor.get("min_pixels", named.get("shortest_edge")), 56 * 56)
    most = _positive(preprocessor.get("max_pixels", named.get("longest_edge")), 28 * 28 * 1280)
    side = patch * merge

    def count(width: int, height: int) -> int | None:
        if width < 1 or height < 1 or max(width, height) / min(width, height) > _MAX_ASPECT:
            return None
        across, down = round(width / side), round(height / side)
        if across * down * side * side > most:
            shrink = math.sqrt(width * height / most)
            across = max(1, math.floor(width / shrink / side))
            down = max(1, math.floor(height / shrink / side))
        elif across * down * side * side < least:
            grow = math.sqrt(least / (width * height))
            across, down = math.ceil(width * grow / side), math.ceil(height * grow / side)
        return across * down

    return count


def _llava(config: JsonMapping, preprocessor: JsonMapping) -> ImageCounter | None:
    """Return the counter of models that scale every image to one size (LLaVA 1.5: 336 by 336 in patches of 14)."""
    if config.get("model_type") != "llava":
        return None  # the same processor stands before models that cut images into tiles
    vision = config.get("vision_config")
    settings: JsonMapping = vision if isinstance(vision, Mapping) else {}
    per_side = _positive(settings.get("image_size"), 336) // _positive(settings.get("patch_size"), 14)
    tokens = _positive(config.get("image_seq_length"), per_side * per_side)
    return lambda width, height: tokens


def _grid(config: JsonMapping, preprocessor: JsonMapping) -> ImageCounter | None:
    return lambda width, height: _GRID_TOKENS


def _positive(value: Any, default: int) -> int:
    return value if _is_id(value) and value > 0 else default


_FAMILIES: Final[Mapping[str, Callable[[JsonMapping, JsonMapping], ImageCounter | None]]] = {
    "Qwen2VLImageProcessor": _qwen2_vl,
    "Qwen2VLImageProcessorFast": _qwen2_vl,
    "CLIPImageProcessor": _llava,
    "CLIPImageProcessorFast": _llava,
    GRID_PROCESSOR: _grid,
    CODES_PROCESSOR: _grid,
}


# Under these names model families write how long a sequence may be; the first one present counts.
_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_UNLIMITED: Final = 10**9  # transformers writes "no limit" as a huge model_max_length


class TextFrame(Struct, frozen=True):
    """The tokens that a tokenizer's post-processor puts around a text, such as `<s>` before it."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: BatchTokenizer) -> TextFrame:
        """Find the tokens by a text that is encoded with them and without."""
        bare, whole = tokenizer.encode("a"), tokenizer.encode_inputs(["a"])[0]
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return cls(tuple(whole[:start]), tuple(whole[start + len(bare) :]))
        return cls()

    def around(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text with those of the frame."""
        return [*self.before, *ids, *self.behind] if self.before or self.behind else ids

    def around_rendered(self, ids: list[int]) -> list[int]:
        """Return the tokens of a rendered chat with those of the frame that its template has not written itself."""
        before = () if tuple(ids[: len(self.before)]) == self.before else self.before
        behind = () if tuple(ids[len(ids) - len(self.behind) :]) == self.behind else self.behind
        return [*before, *ids, *behind]


NO_FRAME: Final = TextFrame()


@dataclass(frozen=True, slots=True)
class TextModel:
    """What the frontend needs to turn a request into tokens and tokens into an answer."""

    tokenizer: Tokenizer
    template: ChatTemplate
    eos_token_ids: tuple[int, ...]  # every id that ends an answer, in the order found
    context_length: int | None = None  # tokens; None: the files do not have it
    vocabulary_size: int | None = None  # one more than the largest id; None: unknown
    control_tokens: ControlTokens | None = None  # None: the tokenizer has none
    has_chat_template: bool = False  # False: `template` is the plain one, because the model brings none
    media: MediaTokens = NO_MEDIA
    text_frame: TextFrame = NO_FRAME
    logprob_pieces: ChatLogprobPieces = dataclasses.field(init=False, compare=False, repr=False)

    @property
    def is_known_by_name_only(self) -> bool:
        """Whether the model brought no files: bytes are its tokens, and the plain template is its own."""
        return isinstance(self.tokenizer, ByteTokenizer)

    @property
    def can_chat(self) -> bool:
        """Whether messages can be made a prompt. A template that the model was not trained on would only resemble one."""
        return self.has_chat_template or self.is_known_by_name_only

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        pieces = ChatLogprobPieces(tokenizer.token_text, tokenizer.token_bytes, size=tokenizer.vocab_size)
        object.__setattr__(self, "logprob_pieces", pieces)


def load_text_model(
    directory: Path | str | None,
    *,
    custom_template: str | Path | None = None,
    named_templates: Mapping[str, str] | None = None,
    now: Callable[[], datetime] | None = None,
    template_budget: BudgetSpec | None = None,
    template_clock: Callable[[], float] = NO_CLOCK,
    tokenizer_cache_bytes: int = 0,
    tokenizer_choice: TokenizerChoice = OWN_ENCODER,
    image_processor: JsonMapping | None = None,
) -> TextModel:
    """Read a model directory; None is a model known only by name: bytes as tokens, and the plain template.

    `custom_template` replaces the model's template: its text, or the path of a file with it. `named_templates` stand
    beside either, in place of those in the directory: `tool_use` is for requests with tools. `now` is the clock that
    templates may print; `template_budget` bounds each rendering, its seconds as `template_clock` counts them. A positive `tokenizer_cache_bytes` puts a `CachedTokenizer` of that size in front.
    `tokenizer_choice` is of the encoder behind it.
    `image_processor` stands in for preprocessor_config.json.

    Raises:
        InvalidArgument: a file is missing or malformed; the message names it.
    """
    custom = custom_template.read_text(encoding="utf-8") if isinstance(custom_template, Path) else custom_template
    if directory is None:
        template = ChatTemplate(custom or PLAIN_TEMPLATE, now=now, budget=template_budget, clock=template_clock)
        return TextModel(ByteTokenizer(), template, (), has_chat_template=custom is not None)
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidArgument(f"the model directory {directory} does not exist")
    config = read_json_object(directory / "config.json")
    generation = read_json_object(directory / "generation_config.json")
    tokenizer_config = read_json_object(directory / "tokenizer_config.json")
    loaded = load_tokenizer(directory, tokenizer_choice)
    if named_templates is None:
        extra = () if custom else sorted(directory.glob("additional_chat_templates/*.jinja"))
        named_templates = {path.stem: path.read_text(encoding="utf-8") for path in extra}
    own = {"default": custom} if custom else _template_source(directory, tokenizer_config)
    source = {**own, **named_templates}
    tokenizer: BatchTokenizer = CachedTokenizer(loaded, tokenizer_cache_bytes) if tokenizer_cache_bytes > 0 else loaded
    names = special_tokens(directory)
    return TextModel(
        tokenizer=tokenizer,
        template=ChatTemplate(
            source or PLAIN_TEMPLATE, special_tokens=names, now=now, budget=template_budget, clock=template_clock
        ),
        eos_token_ids=_eos_token_ids(generation, config, loaded.eos_token, loaded),
        context_length=_context_length(config, tokenizer_config),
        vocabulary_size=max(loaded.vocab_size, *_ints(_text_config(config).get("vocab_size")), 0),
        control_tokens=ControlTokens.of(loaded),
        has_chat_template=bool(source),
        text_frame=TextFrame.of(loaded),
        media=media_tokens(config, image_processor or read_json_object(directory / "preprocessor_config.json")),
    )


def _template_source(directory: Path, tokenizer_config: JsonMapping) -> dict[str, str]:
    """Return the templates by name; a separate file wins over the member of tokenizer_config.json, as in transformers."""
    main = directory / "chat_template.jinja"
    if main.is_file():
        return {"default": main.read_text(encoding="utf-8")}
    in_json = read_json_object(directory / "chat_template.json").get("chat_template")
    return {**templates_by_name(tokenizer_config.get("chat_template")), **templates_by_name(in_json)}


def templates_by_name(value: Any) -> dict[str, str]:
    """Return the templates of a member `chat_template`. Raises InvalidArgument for another shape."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            pairs = [(e.get("name"), e.get("template")) for e in value if isinstance(e, dict)]
            if len(pairs) == len(value) and all(isinstance(n, str) and isinstance(t, str) for n, t in pairs):
                return {str(name): str(template) for name, template in pairs}
        case dict() if all(isinstance(template, str) for template in value.values()):
            return dict(value)
    raise InvalidArgument('chat_template must be a string or a list of {"name", "template"} objects')


def _eos_token_ids(
    generation: JsonMapping, config: JsonMapping, eos_token: str | None, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the generation config's ids, else the model config's, and always the tokenizer's own end token as well.

    Fine-tunes often change the tokenizer's end token and forget the configs; ending at either is what users expect.
    """
    ids = _ints(generation.get("eos_token_id")) or _ints(_text_config(config).get("eos_token_id"))
    own = tokenizer.token_id(eos_token) if eos_token else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))


def _ints(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _text_config(config: JsonMapping) -> JsonMapping:
    """Multimodal models keep the language model's settings one level down."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _context_length(config: JsonMapping, tokenizer_config: JsonMapping) -> int | None:
    text = _text_config(config)
    for value in (*(text.get(key) for key in _CONTEXT_KEYS), tokenizer_config.get("model_max_length")):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _UNLIMITED:
            return value
    return None

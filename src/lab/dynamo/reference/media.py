"""Media in the prompt: images as the model sees them (`vision.py`), and anything else as tokens that its digest draws.

Drawn tokens carry nothing of the media. What is real is the way: an encode worker turns the parts into tokens, the worker that
computes the prompt puts them into it, and the answer depends on every one of them. So an answer with an encode worker equals
the answer without one token for token, another picture gives another answer, and the same picture hits the prefix cache.

The tokens of an image replace its placeholder where the prompt has one for each; else those of all parts stand before it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import xxhash
from blake3 import blake3

from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.multimodal import extract_multimodal_kwargs, require_encoder_result
from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import media_pad_token
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.protocol.records import MEDIA_KINDS
from dynamo.reference.picture_codes import Vision, known_tokens
from dynamo.reference.vision import IMAGE_TOKENS

DEFAULT_PART_TOKENS: Final = 16
MAX_PART_TOKENS: Final = 1024
MAX_PARTS: Final = 32  # of one request
TOKEN_BYTES: Final = 4

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Digest = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class EncodedMedia(msgspec.Struct, frozen=True):
    """What an encode worker hands on: the digest and the tokens of each part, in the order of the request."""

    digests: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_PARTS)]
    token_ids: Annotated[tuple[tuple[TokenId, ...], ...], msgspec.Meta(max_length=MAX_PARTS)]

    @classmethod
    def from_result(cls, result: JsonMapping) -> EncodedMedia:
        """Raises InvalidArgument naming the member that is wrong."""
        try:
            return msgspec.convert(result, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"encoder_result: {error}") from error

    def to_result(self) -> JsonObject:
        """Return the fields as `encoder_result`."""
        return dict(msgspec.to_builtins(self))


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """The media of a prompt."""

    token_ids: tuple[int, ...] = ()  # of all parts
    hashes: tuple[
        int, ...
    ] = ()  # XXH3-64 of each image; (): not all of the parts are images that are seen, or not known here

    def placed(
        self, token_ids: Sequence[int], prompt_tokens: int, vision: Vision | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the whole prompt, and how routers hash its beginning; () where that is the prompt itself.

        `prompt_tokens`: how many of `token_ids` are the client's; the rest was generated, and has no placeholders.
        """
        if not self.token_ids:
            return tuple(token_ids), ()
        places = []
        if vision is not None:
            places = [place for place in range(prompt_tokens) if token_ids[place] == vision.image_token_id]
        if not places or len(places) * IMAGE_TOKENS != len(self.token_ids):
            return (*self.token_ids, *token_ids), ()
        parts = [self.token_ids[at : at + IMAGE_TOKENS] for at in range(0, len(self.token_ids), IMAGE_TOKENS)]
        prompt = _replaced(token_ids, places, parts)
        if len(self.hashes) != len(places):
            return prompt, ()
        return prompt, _replaced(token_ids, places, [(media_pad_token(each),) * IMAGE_TOKENS for each in self.hashes])


NO_MEDIA: Final = MediaPrompt()


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What a worker does with media. Raises InvalidArgument, with the flag's name, for what cannot be."""

    part_tokens: int = 0  # that a part stands as; 0: media are refused
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    route_to_encoder: bool = False  # an encode worker makes the tokens, and not this one

    def __post_init__(self) -> None:
        if not 0 <= self.part_tokens <= MAX_PART_TOKENS:
            raise InvalidArgument(f"--media-tokens must be in 0..{MAX_PART_TOKENS}, got {self.part_tokens}")

    def declaration(self, vision: Vision | None) -> dict[str, list[str]]:
        """Return what the card has of media; a decode worker leaves it to the prefill workers.

        Raises InvalidArgument for an encode worker before one that takes no media.
        """
        if self.route_to_encoder and not self.part_tokens and vision is None:
            raise InvalidArgument(
                "--route-to-encoder needs --media-tokens, or a model that sees: this one takes no media"
            )
        if self.mode is DisaggregationMode.DECODE:
            return {}
        if self.part_tokens:
            return {MEDIA_KINDS: ["image", "video", "audio"]}
        return {MEDIA_KINDS: [] if vision is None else ["image"]}

    def parts_of(self, request: JsonMapping) -> list[MediaItem]:
        """Return the parts of a request. Raises InvalidArgument naming the part that is wrong."""
        options = msgspec.json.encode(request.get("mm_processor_kwargs") or {}, order="deterministic")
        return _items(extract_multimodal_kwargs(request) or {}, options)

    def tokens(
        self,
        item: MediaItem,
        vocab_size: int,
        vision: Vision | None = None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...]:
        """Return what stands for a part in the prompt.

        Raises InvalidArgument naming it, and Cancelled once `is_given_up` returns True.
        """
        if vision is not None and item.kind == "image":
            try:
                return vision.tokens(item.content, is_given_up)
            except InvalidArgument as error:
                raise InvalidArgument(f"{item.where}: {error}") from error
        if not self.part_tokens:
            raise InvalidArgument(f"{item.where}: this worker takes no {item.kind} (see --media-tokens)")
        return _drawn(bytes.fromhex(item.digest), self.part_tokens, vocab_size)

    def encode(self, request: JsonMapping, vocab_size: int, vision: Vision | None = None) -> EncodedMedia:
        """Return the digests and tokens of a request's parts. Raises InvalidArgument naming the part that is wrong."""
        items = self.parts_of(request)
        tokens = tuple(self.tokens(item, vocab_size, vision) for item in items)
        return EncodedMedia(tuple(item.digest for item in items), tokens)

    def prompt_of(
        self,
        request: JsonMapping,
        vocab_size: int,
        vision: Vision | None = None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> MediaPrompt:
        """Return what stands for the media in the prompt. Blocks while it sees.

        Raises InvalidArgument where media are refused, and where the result of the encode worker is missing or another
        request's; Cancelled once `is_given_up` returns True.
        """
        has_media = any((request.get("multi_modal_data") or {}).values())
        if not has_media and request.get("encoder_result") is None:
            return NO_MEDIA
        if not self.part_tokens and vision is None:
            raise InvalidArgument(
                "multi_modal_data is set, but this worker takes no images, audio or video (see --media-tokens)"
            )
        if self.mode is DisaggregationMode.DECODE:
            raise InvalidArgument(
                "multi_modal_data is set, but a decode worker takes no media: its prefill worker does"
            )
        items = self.parts_of(request)
        if self.route_to_encoder:
            encoded = EncodedMedia.from_result(require_encoder_result(request, self.mode))
            if encoded.digests != tuple(item.digest for item in items):
                raise InvalidArgument("encoder_result belongs to other media than those of this request")
            _check(encoded.token_ids, known_tokens(vocab_size, vision))
            parts = encoded.token_ids
        else:
            parts = tuple(self.tokens(item, vocab_size, vision, is_given_up) for item in items)
        is_seen = vision is not None and all(item.kind == "image" for item in items)
        hashes = tuple(xxhash.xxh3_64_intdigest(item.content) for item in items) if is_seen else ()
        return MediaPrompt(tuple(token for part in parts for token in part), hashes)


class MediaItem(NamedTuple):
    """One part of a request."""

    kind: str  # image, video, audio
    content: bytes
    where: str
    digest: str  # BLAKE3 of kind, options and content, 64 hex digits


def _replaced(token_ids: Sequence[int], places: Sequence[int], parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    found: list[int] = []
    start = 0
    for place, part in zip(places, parts, strict=True):
        found += (*token_ids[start:place], *part)
        start = place + 1
    return (*found, *token_ids[start:])


def _items(media: JsonMapping, options: bytes) -> list[MediaItem]:
    """Return the parts. Raises InvalidArgument naming the part that is wrong."""
    data = media.get("multi_modal_data") or {}
    if not isinstance(data, Mapping):
        raise InvalidArgument(f"multi_modal_data must be an object, got {type(data).__name__}")
    found: list[MediaItem] = []
    for kind, slots in data.items():
        if not isinstance(slots, list | tuple):
            raise InvalidArgument(f"multi_modal_data.{kind} must be a list, got {type(slots).__name__}")
        # The two spellings of a kind mean the same.
        for place, slot in enumerate(slots):
            where = f"multi_modal_data.{kind}[{place}]"
            name, content = str(kind).removesuffix("_url"), _content(slot, where)
            digest = blake3(name.encode() + b"\0" + options + b"\0" + content).hexdigest()
            found.append(MediaItem(name, content, where, digest))
    if len(found) > MAX_PARTS:
        raise InvalidArgument(f"multi_modal_data has {len(found)} parts, more than {MAX_PARTS}")
    return found


def _content(slot: Any, where: str) -> bytes:
    """Return the bytes of one slot: a data URL in base64. This engine fetches nothing."""
    url = slot.get("Url") if isinstance(slot, Mapping) else None
    if not isinstance(url, str) or not url.startswith("data:"):
        raise InvalidArgument(f'{where} must be {{"Url": "data:..."}}: the reference engine fetches nothing')
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidArgument(f"{where}.Url must be a data URL in base64")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"{where}.Url is not valid base64: {error}") from error


def _drawn(digest: bytes, count: int, vocab_size: int) -> tuple[int, ...]:
    """Return tokens that a digest draws."""
    drawn = blake3(digest).digest(length=count * TOKEN_BYTES)
    steps = range(0, len(drawn), TOKEN_BYTES)
    return tuple(int.from_bytes(drawn[at : at + TOKEN_BYTES], "little") % vocab_size for at in steps)


def _check(parts: Sequence[Sequence[int]], known: int) -> None:
    """Raises InvalidArgument for a token that the model does not have."""
    for part in parts:
        for token in part:
            if token >= known:
                raise InvalidArgument(f"encoder_result.token_ids holds {token}; this model knows 0 to {known - 1}")

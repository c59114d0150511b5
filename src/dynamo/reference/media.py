"""Media without vision: each part of a request stands in the prompt as tokens that its content's digest draws.

No model sees a picture here. What is real is the way: an encode worker turns the parts into tokens, the worker that computes the
prompt puts those tokens before it, and the answer depends on every one of them. So an answer with an encode worker equals the
answer without one token for token, another picture gives another answer, and the same picture hits the prefix cache.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3

from dynamo.contract.modes import DisaggregationMode
from dynamo.contract.requests.multimodal import extract_multimodal_kwargs, require_encoder_result
from dynamo.errors import InvalidArgument
from dynamo.protocol.records import MEDIA_KINDS

__all__ = ["DEFAULT_PART_TOKENS", "EncodedMedia", "MediaOptions"]

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
    def from_result(cls, result: Mapping[str, Any]) -> EncodedMedia:
        """Raises InvalidArgument naming the member that is wrong."""
        try:
            return msgspec.convert(result, cls)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"encoder_result: {error}") from error

    def to_result(self) -> dict[str, Any]:
        """Return the fields as `encoder_result`."""
        return dict(msgspec.to_builtins(self))


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What a worker does with media. Raises InvalidArgument, with the flag's name, for what cannot be."""

    part_tokens: int = 0  # that a part stands as; 0: media are refused
    mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    route_to_encoder: bool = False  # an encode worker makes the tokens, and not this one

    def __post_init__(self) -> None:
        if not 0 <= self.part_tokens <= MAX_PART_TOKENS:
            raise InvalidArgument(f"--media-tokens must be in 0..{MAX_PART_TOKENS}, got {self.part_tokens}")
        if self.route_to_encoder and not self.part_tokens:
            raise InvalidArgument(
                "--route-to-encoder needs --media-tokens: without it the reference engine takes no media"
            )

    def declaration(self) -> dict[str, list[str]]:
        """Return what the card says of media; a decode worker leaves it to the prefill workers."""
        if self.mode is DisaggregationMode.DECODE:
            return {}
        return {MEDIA_KINDS: ["image", "video", "audio"] if self.part_tokens else []}

    def encode(self, request: Mapping[str, Any], vocab_size: int) -> EncodedMedia:
        """Return the digests and tokens of a request's parts. Raises InvalidArgument naming the part that is wrong."""
        media = extract_multimodal_kwargs(request) or {}
        options = msgspec.json.encode(media.get("mm_processor_kwargs") or {}, order="deterministic")
        hashes = [blake3(kind.encode() + b"\0" + options + b"\0" + content) for kind, content in _parts(media)]
        tokens = [each.digest(length=self.part_tokens * TOKEN_BYTES) for each in hashes]
        return EncodedMedia(
            tuple(each.hexdigest() for each in hashes), tuple(_token_ids(each, vocab_size) for each in tokens)
        )

    def tokens_of(self, request: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that stand before the prompt; () for a request of text.

        Raises InvalidArgument where media are refused, and where the result of the encode worker is missing or another
        request's.
        """
        has_media = any((request.get("multi_modal_data") or {}).values())
        if not has_media and request.get("encoder_result") is None:
            return ()
        if not self.part_tokens:
            raise InvalidArgument(
                "multi_modal_data is set, but this worker takes no images, audio or video (see --media-tokens)"
            )
        if self.mode is DisaggregationMode.DECODE:
            raise InvalidArgument(
                "multi_modal_data is set, but a decode worker takes no media: its prefill worker does"
            )
        own = self.encode(request, vocab_size)
        if self.route_to_encoder:
            found = EncodedMedia.from_result(require_encoder_result(request, self.mode))
            if found.digests != own.digests:
                raise InvalidArgument("encoder_result belongs to other media than those of this request")
            _check(found.token_ids, vocab_size)
            own = found
        return tuple(token for part in own.token_ids for token in part)


def _parts(media: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return the kind and the content of each part. Raises InvalidArgument naming the part that is wrong."""
    data = media.get("multi_modal_data") or {}
    if not isinstance(data, Mapping):
        raise InvalidArgument(f"multi_modal_data must be an object, got {type(data).__name__}")
    found: list[tuple[str, bytes]] = []
    for kind, slots in data.items():
        if not isinstance(slots, list | tuple):
            raise InvalidArgument(f"multi_modal_data.{kind} must be a list, got {type(slots).__name__}")
        # The two spellings of a kind mean the same.
        found += [
            (str(kind).removesuffix("_url"), _content(slot, f"multi_modal_data.{kind}[{place}]"))
            for place, slot in enumerate(slots)
        ]
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


def _token_ids(drawn: bytes, vocab_size: int) -> tuple[int, ...]:
    steps = range(0, len(drawn), TOKEN_BYTES)
    return tuple(int.from_bytes(drawn[at : at + TOKEN_BYTES], "little") % vocab_size for at in steps)


def _check(parts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises InvalidArgument for a token that the model does not have."""
    for part in parts:
        for token in part:
            if token >= vocab_size:
                raise InvalidArgument(f"encoder_result.token_ids holds {token}; this model knows 0 to {vocab_size - 1}")

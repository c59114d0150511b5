"""The vision of the reference engine: what it sees, where it stands in the prompt, and what routers are told of it."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import sys
import zlib
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from dynamo.contract.chunks import GenerateChunk
from dynamo.contract.conformance import mock_context
from dynamo.contract.modes import DisaggregationMode
from dynamo.errors import Cancelled, InvalidArgument
from dynamo.kv.hashing import block_hashes
from dynamo.kv.media_routing import expand_images
from dynamo.reference import Options, ReferenceEngine
from dynamo.reference.config import read_model_config
from dynamo.reference.encoder import ReferenceEncoder
from dynamo.reference.media import MediaOptions, MediaPrompt
from dynamo.reference.picture_files import _rows, read_picture, read_png
from dynamo.reference.vision import ColourGrid, colours_of
from dynamo.runtime.calls.context import Context
from support.pictures import BLUE, JPEG, RED, png, png_of, quarters_png
from support.reference_models import CONFIGS, write_model
from support.vision_model import IMAGE_TOKEN, vision_config

VISION = ColourGrid(image_token_id=IMAGE_TOKEN, first_token_id=33)
CORNERS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
FOUR = quarters_png(CORNERS)
SMALL = Options(block_size=4, kv_cache_mb=2, max_num_seqs=4, max_num_batched_tokens=32)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def coded(pixels: np.ndarray, colour_type: int, filters: list[int], palette: bytes = b"") -> bytes:
    """A PNG of these samples (height, width, channels), each line by the filter of its turn, straight from the standard."""
    height, width, step = pixels.shape
    flat = pixels.reshape(height, width * step).astype(int)
    lines = []
    for row in range(height):
        kind = filters[row % len(filters)]
        line = []
        for at in range(width * step):
            left = int(flat[row, at - step]) if at >= step else 0
            up = int(flat[row - 1, at]) if row else 0
            corner = int(flat[row - 1, at - step]) if row and at >= step else 0
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda value: abs(guess - value))
            line.append((int(flat[row, at]) - [0, left, up, (left + up) // 2, nearest][kind]) % 256)
        lines.append(bytes([kind, *line]))
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"PLTE", palette) if palette else b""]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IDAT", zlib.compress(b"".join(lines))) + chunk(b"IEND", b"")


def unpacked(picture: bytes) -> bytes:
    at = picture.index(b"IDAT")
    return zlib.decompress(picture[at + 4 : at + 4 + int.from_bytes(picture[at - 4 : at], "big")])


@pytest.mark.parametrize("filters", [[0], [1], [2], [3], [4], [0, 1, 2, 3, 4]])
def test_every_filter_of_a_line_is_undone(filters: list[int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    assert (read_png(coded(pixels, 2, filters)) == pixels).all()


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 9, 4), (9, 1, 2), (2, 40, 1), (40, 2, 3), (17, 23, 4)])
def test_filters_are_undone_in_pictures_of_every_shape(shape: tuple[int, int, int]) -> None:
    samples = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    kinds = [4, 3, 0, 4, 1, 2]
    lines = np.frombuffer(unpacked(coded(samples, 2, kinds)), np.uint8).reshape(shape[0], -1)
    packed = zlib.compress(lines.tobytes())
    assert (_rows(packed, shape[1], shape[0], shape[2], lambda: False) == samples).all()


@pytest.mark.parametrize("kind", [1, 4])
def test_a_picture_costs_a_step_for_each_line_and_column_and_not_for_each_pixel(kind: int) -> None:
    height, width = 2000, 3000
    steps = 0

    def is_given_up() -> bool:
        nonlocal steps
        steps += 1
        return False

    lines = np.zeros((height, 1 + 3 * width), np.uint8)
    lines[:, 0] = kind
    pixels = read_png(png_of(width, height, zlib.compress(lines.tobytes())), is_given_up)
    assert pixels.shape == (height, width, 3)
    assert steps <= (height + width) // 64 + 1


@pytest.mark.parametrize("kind", [2, 4])
def test_a_picture_is_given_up_when_its_client_leaves(kind: int) -> None:
    lines = np.full((500, 1 + 3 * 500), kind, np.uint8)
    leaves = iter([False, True])
    with pytest.raises(Cancelled):
        VISION.tokens(png_of(500, 500, zlib.compress(lines.tobytes())), lambda: next(leaves))


def test_a_picture_with_a_long_side_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 16384"):
        read_png(png_of(16_385, 1, zlib.compress(bytes(1 + 3 * 16_385))))


def test_grey_palette_and_transparency_become_colours() -> None:
    grey = np.array([[[10], [200]]], np.uint8)
    assert read_png(coded(grey, 0, [0])).tolist() == [[[10] * 3, [200] * 3]]
    assert read_png(coded(np.array([[[1], [0]]], np.uint8), 3, [0], b"\1\2\3\4\5\6")).tolist() == [
        [[4, 5, 6], [1, 2, 3]]
    ]
    clear = np.array([[[9, 9, 9, 0], [9, 9, 9, 255]]], np.uint8)
    assert read_png(coded(clear, 6, [0])).tolist() == [[[255] * 3, [9] * 3]]
    assert read_png(coded(np.array([[[7, 255]]], np.uint8), 4, [0])).tolist() == [[[7] * 3]]


def test_an_image_is_sixteen_colours_where_they_are() -> None:
    red, green, blue, white = 48, 12, 3, 63
    assert colours_of(read_png(FOUR)) == [*[red, red, green, green] * 2, *[blue, blue, white, white] * 2]
    assert colours_of(read_png(png([[(0, 0, 0), (128, 64, 192)]]))) == [0, 0, 39, 39] * 4
    assert VISION.tokens(RED) == (33 + 48,) * 16


@pytest.mark.parametrize(
    "content",
    [b"", b"picture", JPEG, FOUR[:30], FOUR[:60], png_of(5000, 5000, b""), png_of(8, 8, b"no zlib"), png_of(8, 8, zlib.compress(b"\0" * 10)),
     png_of(8, 8, zlib.compress(b"\x09" * 200)), png_of(0, 8, b""), FOUR.replace(b"\x08\x02\0\0\0", b"\x10\x02\0\0\0")],
)  # fmt: skip
def test_what_cannot_be_seen_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidArgument):
        VISION.tokens(content)


def saved(kind: str, image: Any = None, **how: Any) -> bytes:
    """A file of that kind by Pillow: red, unless another image is given."""
    images = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    (image or images.new("RGB", (24, 16), (250, 10, 10))).save(file, kind, **how)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "PNG"])
def test_other_kinds_of_images_are_seen_with_pillow(kind: str) -> None:
    pixels = read_picture(saved(kind))
    assert pixels.shape == (16, 24, 3)
    assert abs(pixels.astype(int) - (250, 10, 10)).max() <= 8  # JPEG and WebP are not exact
    assert VISION.tokens(saved(kind)) == (33 + 48,) * 16


def test_an_image_is_seen_upright_and_over_white() -> None:
    images = pytest.importorskip("PIL.Image")
    two = images.new("RGB", (32, 16), (0, 0, 255))
    two.paste((255, 0, 0), (0, 0, 16, 16))
    turned = images.Exif()
    turned[0x0112] = 6  # what a camera that was held upright writes: turn a quarter to the right
    pixels = read_picture(saved("JPEG", two, exif=turned, quality=95))
    assert pixels.shape == (32, 16, 3)
    assert pixels[4, 8, 0] > 200 > 50 > pixels[28, 8, 0]
    assert (read_picture(saved("WEBP", images.new("RGBA", (4, 4), (0, 0, 0, 0)))) == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_a_broken_or_oversized_image_is_refused_with_pillow_too(kind: str) -> None:
    images = pytest.importorskip("PIL.Image")
    whole = saved(kind, images.effect_noise((64, 64), 90))
    for length in (4, 12, 20, len(whole) // 2):
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read_picture(whole[:length])
    with pytest.raises(InvalidArgument, match="pixels"):
        read_picture(saved(kind, images.new("L", (5000, 4000))))


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    for content in (JPEG, FOUR.replace(b"\x08\x02\0\0\0", b"\x10\x02\0\0\0")):
        with pytest.raises(InvalidArgument, match=r"pip install .pillow"):
            read_picture(content)


# -- in the prompt -------------------------------------------------------------------------------------------------------


def test_the_tokens_of_an_image_replace_its_placeholder() -> None:
    media = MediaPrompt((7,) * 16 + (8,) * 16, (1, 2))
    prompt, routed = media.placed([5, IMAGE_TOKEN, 6, IMAGE_TOKEN, 9], 5, VISION)
    assert prompt == (5, *[7] * 16, 6, *[8] * 16, 9)
    assert routed == (5, *[1_000_001] * 16, 6, *[1_000_002] * 16, 9)


@pytest.mark.parametrize(
    ("tokens", "original"), [([5, 6], 2), ([5, IMAGE_TOKEN], 2), ([IMAGE_TOKEN, IMAGE_TOKEN, 5, IMAGE_TOKEN], 4)]
)
def test_without_a_placeholder_for_each_image_they_stand_before_the_prompt(tokens: list[int], original: int) -> None:
    media = MediaPrompt((7,) * 32, (1, 2))
    assert media.placed(tokens, original, VISION) == ((*[7] * 32, *tokens), ())
    assert media.placed([IMAGE_TOKEN, IMAGE_TOKEN], 2, None) == ((*[7] * 32, IMAGE_TOKEN, IMAGE_TOKEN), ())


def test_a_placeholder_that_was_generated_is_none() -> None:
    prompt, _ = MediaPrompt((7,) * 16, (1,)).placed([IMAGE_TOKEN, 5, IMAGE_TOKEN], 2, VISION)
    assert prompt == (*[7] * 16, 5, IMAGE_TOKEN)


# -- in an engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIGS["llama"]
    return write_model(tmp_path_factory.mktemp("seeing") / "model", {**config, **vision_config(config["vocab_size"])})


def body(*pictures: bytes, tokens: list[int] | None = None, **more: Any) -> Any:
    urls = [{"Url": f"data:image/png;base64,{base64.b64encode(each).decode()}"} for each in pictures]
    return {
        "token_ids": tokens or [5, *[IMAGE_TOKEN] * len(pictures), 6, 7, 8],
        "stop_conditions": {"max_tokens": 8, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "multi_modal_data": {"image_url": urls},
        **more,
    }


async def collect(engine: ReferenceEngine, request: Any) -> list[GenerateChunk]:
    async with aclosing(engine.generate(request, mock_context())) as stream:
        return [chunk async for chunk in stream]


def said(chunks: list[GenerateChunk]) -> list[int]:
    return [token for each in chunks for token in each["token_ids"]]


class Recorder:
    def __init__(self) -> None:
        self.stored: list[dict[str, Any]] = []

    def publish_batch(self, events: list[dict[str, Any]]) -> None:
        self.stored += [event for event in events if event["type"] == "stored"]


async def test_the_engine_computes_what_it_sees_and_tells_routers_what_they_hash(model: Path) -> None:
    engine = ReferenceEngine(model, SMALL)
    config = await engine.start(1)
    try:
        assert config.runtime_data["media"] == ["image"]
        recorder = Recorder()
        source: Any
        (source,) = await engine.kv_event_sources()
        source.on_ready(recorder)
        seen = await collect(engine, body(FOUR))
        plain = body(tokens=[5, *VISION.tokens(FOUR), 6, 7, 8])
        plain["multi_modal_data"] = None
        assert said(await collect(engine, plain)) == said(seen)  # the same prompt, written out
        assert seen[-1]["completion_usage"]["prompt_tokens"] == 20
        routed = expand_images([5, IMAGE_TOKEN, 6, 7, 8], IMAGE_TOKEN, [(xxhash.xxh3_64_intdigest(FOUR), 16)], 4)
        assert routed is not None
        published = [token for event in recorder.stored[:5] for token in event["token_ids"]]
        assert block_hashes(published, 4) == block_hashes(routed.token_ids, 4)
    finally:
        await engine.cleanup()


async def test_the_same_image_hits_the_prefix_and_another_or_another_order_does_not(model: Path) -> None:
    engine = ReferenceEngine(model, SMALL)
    await engine.start(1)
    try:
        answers = []
        for pictures, cached in (
            ([RED, BLUE], 0),
            ([RED, BLUE], 32),
            ([RED, FOUR], 16),
            ([BLUE, RED], 0),
        ):
            chunks = await collect(engine, body(*pictures))
            details = chunks[-1]["completion_usage"].get("prompt_tokens_details") or {}
            assert details.get("cached_tokens", 0) == cached, pictures
            answers.append(said(chunks))
        assert answers[0] == answers[1]
        with pytest.raises(InvalidArgument, match=r"multi_modal_data.image_url\[1\]"):
            await collect(engine, body(RED, b"no picture"))
        with pytest.raises(InvalidArgument, match="takes no audio"):
            await collect(
                engine, {**body(), "multi_modal_data": {"audio_url": body(RED)["multi_modal_data"]["image_url"]}}
            )
    finally:
        await engine.cleanup()


def test_a_model_that_sees_says_so_in_its_config(model: Path, tmp_path: Path) -> None:
    assert read_model_config(model).vision == VISION
    config = {**CONFIGS["llama"], **vision_config(97)}
    for wrong in (
        {"image_token_id": 97},
        {"vision_config": {"model_type": "clip"}},
        {"vision_config": {"model_type": "colour_grid", "first_token_id": 34}},
    ):
        directory = write_model(tmp_path / "wrong", {**config, **wrong})
        with pytest.raises(InvalidArgument, match=r"image_token_id|vision_config|first_token_id"):
            read_model_config(directory)
    assert MediaOptions().declaration(None) == {"media": []}


# -- an encode worker ----------------------------------------------------------------------------------------------------


async def encoder_of(model: Path, cache_bytes: int) -> ReferenceEncoder:
    encoder = ReferenceEncoder(model, MediaOptions(mode=DisaggregationMode.ENCODE), cache_bytes=cache_bytes)
    await encoder.start(1)
    return encoder


async def results(encoder: ReferenceEncoder, *pictures: bytes) -> dict[str, Any]:
    async with aclosing(encoder.generate(body(*pictures), mock_context())) as stream:
        (last,) = [chunk async for chunk in stream]
    return last["encoder_result"]


async def test_an_image_is_encoded_once_for_all_who_ask_and_kept(model: Path) -> None:
    encoder = await encoder_of(model, 100_000)
    try:
        together = await asyncio.gather(*[results(encoder, FOUR, RED) for _ in range(6)])
        assert encoder.encoded == 2
        assert all(each == together[0] for each in together)
        assert together[0] == MediaOptions().encode(body(FOUR, RED), 97, VISION).to_result()
        assert await results(encoder, RED) == MediaOptions().encode(body(RED), 97, VISION).to_result()
        assert encoder.encoded == 2
        with pytest.raises(InvalidArgument, match="none of PNG"):
            await results(encoder, RED, b"no picture")
    finally:
        await encoder.cleanup()


async def test_the_cache_of_an_encode_worker_is_bounded(model: Path) -> None:
    encoder = await encoder_of(model, 4000)
    try:
        for number in range(20):
            await results(encoder, png([[(number, 0, 0)]]))
            assert encoder.cache.bytes <= 4000
        assert encoder.encoded == 20
        await results(encoder, png([[(19, 0, 0)]]))
        assert encoder.encoded == 20
        await results(encoder, png([[(0, 0, 0)]]))  # long gone
        assert encoder.encoded == 21
    finally:
        await encoder.cleanup()
    without = await encoder_of(model, 0)
    await results(without, RED)
    await results(without, RED)
    assert (without.encoded, without.cache.bytes) == (2, 0)
    await without.cleanup()


async def reasons(engine: Any, request: Any, context: Context) -> list[str | None]:
    async with aclosing(engine.generate(request, context)) as stream:
        return [chunk.get("finish_reason") async for chunk in stream]


async def test_engine_and_encoder_end_a_request_whose_client_left_before_its_picture_was_seen(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, stays = mock_context(), mock_context()
    looks = 0
    whole = ColourGrid.tokens

    def tokens(vision: ColourGrid, content: bytes, is_given_up: Any) -> tuple[int, ...]:
        nonlocal looks
        looks += 1
        left.stop_generating()
        return whole(vision, content, is_given_up)

    monkeypatch.setattr(ColourGrid, "tokens", tokens)
    engine, encoder = ReferenceEngine(model, SMALL), await encoder_of(model, 100_000)
    await engine.start(1)
    try:
        assert await reasons(engine, body(FOUR), left) == ["cancelled"]
        assert await reasons(encoder, body(FOUR), left) == ["cancelled"]
        assert (looks, encoder.encoded, encoder._waiting) == (2, 0, {})
        both = asyncio.gather(reasons(encoder, body(FOUR), left), reasons(encoder, body(FOUR), stays))
        assert await both == [["cancelled"], ["stop"]]
        assert (encoder.encoded, encoder._waiting) == (1, {})
    finally:
        await engine.cleanup()
        await encoder.cleanup()

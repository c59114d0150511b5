"""Embeddings from one process to another, in one process here: equal content, taken once, and nothing left of any mistake."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dynamo.common.multimodal import (
    EMBEDDING_RECEIVER_FACTORIES,
    EMBEDDING_SENDER_FACTORIES,
    DecodedMediaWriter,
    EmbeddingTransferMode,
    LocalEmbeddingReceiver,
    LocalEmbeddingSender,
    MmKwargsShmWriter,
    TransferRequest,
    decoded_content_hash,
    read_decoded_media,
    read_mm_kwargs,
)
from dynamo.engines.handover import HeldFiles, Leftovers, RawTensor, TakenFile, raw_tensor, restored_tensor
from dynamo.errors import Disconnected, InvalidArgument, Overloaded, WorkerUnavailable
from support.cases import each_case

SHARED = Path("/dev/shm")
LOCAL, SHM = EmbeddingTransferMode.LOCAL, EmbeddingTransferMode.SHARED_MEMORY
both = pytest.mark.parametrize("mode", [LOCAL, SHM], ids=lambda mode: mode.value)
EMBEDDING = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does: its files are gone when its senders are closed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert ours(tmp_path) == []


def ours(directory: Path) -> list[str]:
    """What this process has left where embeddings are handed over."""
    names = [path.name for path in (*directory.iterdir(), *SHARED.iterdir())]
    marks = (
        f"encoder_cache.{os.getpid()}-",
        f"dynamo_embedding.{os.getpid()}-",
        f"mm_kwargs_{os.getpid()}_",
        f"dynamo_pixels.{os.getpid()}-",
    )
    return [name for name in names if name.startswith(marks)]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def place_of(request: TransferRequest) -> Path:
    found = request.serialized_request
    return Path(found) if isinstance(found, str) else SHARED / found["name"]


class Pair:
    """A sender and a receiver of one mode."""

    def __init__(self, mode: EmbeddingTransferMode, **bounds: Any) -> None:
        self.sender, self.receiver = EMBEDDING_SENDER_FACTORIES[mode](**bounds), EMBEDDING_RECEIVER_FACTORIES[mode]()

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.receiver.close()
        await self.sender.aclose(0)


TENSORS: dict[str, Any] = {
    "float32": EMBEDDING,
    "a transposed float16": EMBEDDING.astype(np.float16).T,
    "nothing": np.zeros((0, 3)),
    "a number": np.array(7),
    "booleans": np.array([True, False]),
    "bytes": b"abc",
    "a view of unsigned numbers": memoryview(b"abcdefgh").cast("I"),
}


@both
async def test_what_is_received_equals_what_was_sent(mode: EmbeddingTransferMode) -> None:
    async with Pair(mode) as pair:
        for name, tensor in TENSORS.items():
            request, done = await pair.sender.send_embeddings(tensor, stage_embeddings=True)
            await done
            number, found = await pair.receiver.receive_embeddings(TransferRequest.from_dict(request.to_dict()))
            assert np.array_equal(found, np.asarray(memoryview(tensor))), name
            assert found.flags.writeable or found.size == 0  # a copy of its own
            pair.receiver.release_tensor(number)
            pair.receiver.release_tensor(number)  # twice is fine
            assert pair.sender.waiting == 0
            assert not place_of(request).exists()


async def test_a_local_file_is_a_safetensors_file_with_the_guides_name_and_key(tmp_path: Path) -> None:
    async with Pair(LOCAL) as pair:
        request, _ = await pair.sender.send_embeddings(EMBEDDING)
        path = place_of(request)
        assert (path.parent, path.name[:14], path.name.split("_")[2][:2]) == (tmp_path, "encoder_cache.", "0.")
        assert np.array_equal(load_file(path)["ec_cache"], EMBEDDING)
        assert (request.embeddings_shape, request.embedding_dtype_str) == ([3, 4], "float32")
        save_file({"ec_cache": EMBEDDING + 1}, path)  # and a file of that library is read
        _, found = await pair.receiver.receive_embeddings(request)
        assert np.array_equal(found, EMBEDDING + 1)
        assert path.name in names_in(tmp_path)  # until it is released


async def test_shared_memory_has_no_name_any_more_once_it_is_received() -> None:
    async with Pair(SHM) as pair:
        request, _ = await pair.sender.send_embeddings(EMBEDDING)
        _, found = await pair.receiver.receive_embeddings(request)
        assert not place_of(request).exists()
        assert np.array_equal(found, EMBEDDING)
        with pytest.raises(Disconnected, match="is not there: its sender is gone"):
            await pair.receiver.receive_embeddings(request)


def wrong(**changes: Any) -> Any:
    return lambda request: TransferRequest(**{**request.to_dict(), **changes})


WRONG = {
    "another shape": wrong(embeddings_shape=[4, 4]),
    "the same bytes in another shape, or fewer": wrong(embeddings_shape=[3, 3]),
    "another type": wrong(embedding_dtype_str="int64"),
    "an unknown type": wrong(embedding_dtype_str="float3"),
    "a negative side": wrong(embeddings_shape=[-3, -4]),
}


@both
async def test_a_handle_that_describes_another_tensor_is_refused_and_the_tensor_removed(
    mode: EmbeddingTransferMode,
) -> None:
    async with Pair(mode) as pair:
        for name, change in WRONG.items():
            request, _ = await pair.sender.send_embeddings(EMBEDDING)
            with pytest.raises(InvalidArgument):
                await pair.receiver.receive_embeddings(change(request))
            assert not place_of(request).exists(), name


@both
async def test_a_handle_to_any_other_file_is_refused_and_the_file_stays(
    mode: EmbeddingTransferMode, tmp_path: Path
) -> None:
    other = tmp_path / "secret"
    other.write_bytes(b"\0" * 48)
    (tmp_path / "encoder_cache.1-a_0.x").symlink_to(other)
    (tmp_path / "encoder_cache.1-a_1.x").mkdir()
    (tmp_path / "encoder_cache.1-a_2.x").write_bytes(b"\xff" * 48)
    os.mkfifo(tmp_path / "encoder_cache.1-a_3.x")
    named = [f"encoder_cache.1-a_{number}.x" for number in range(4)]
    handles: list[object] = [None, 7, "secret", str(other), *(str(tmp_path / name) for name in named)]
    handles += [{"name": name, "size": 48} for name in (str(other), f"../../{other}", "..", "encoder_cache.lock")]
    async with Pair(mode) as pair:
        for handle in handles:
            with pytest.raises((InvalidArgument, Disconnected)):
                await pair.receiver.receive_embeddings(TransferRequest([3, 4], "float32", handle))
    assert other.read_bytes() == b"\0" * 48


@each_case("found", [None, [], {}, {"embeddings_shape": "3", "embedding_dtype_str": "f", "serialized_request": 1}])
def test_a_handle_of_another_form_is_refused(found: object) -> None:
    with pytest.raises(InvalidArgument, match="a handle to an embedding is wrong"):
        TransferRequest.from_dict(found)


@both
async def test_what_waits_is_bounded_and_what_was_taken_makes_room(mode: EmbeddingTransferMode) -> None:
    async with Pair(mode, max_bytes=1000) as pair:
        with pytest.raises(InvalidArgument, match=r"are to be handed over, more than the bound of 1000"):
            await pair.sender.send_embeddings(np.zeros(300, np.float32))
        first, _ = await pair.sender.send_embeddings(np.zeros(200, np.float32))
        with pytest.raises(Overloaded, match="wait for the workers that were to take them"):
            await pair.sender.send_embeddings(np.zeros(200, np.float32))
        number, _ = await pair.receiver.receive_embeddings(first)
        pair.receiver.release_tensor(number)
        await pair.sender.send_embeddings(np.zeros(200, np.float32))


@both
async def test_what_is_not_released_is_bounded(mode: EmbeddingTransferMode) -> None:
    async with Pair(mode) as pair:
        receiver = EMBEDDING_RECEIVER_FACTORIES[mode](max_bytes=1000)
        requests = [(await pair.sender.send_embeddings(np.zeros(250, np.float32)))[0] for _ in range(2)]
        large, _ = await pair.sender.send_embeddings(np.zeros(500, np.float32))
        with pytest.raises(InvalidArgument, match="more than the bound of 1000"):
            await receiver.receive_embeddings(large)
        if mode is SHM:  # a file has a header, too
            number, _ = await receiver.receive_embeddings(requests[0])
            with pytest.raises(Overloaded, match="received and not released"):
                await receiver.receive_embeddings(requests[1])
            receiver.release_tensor(number)
            assert not place_of(requests[1]).exists()
        assert not place_of(large).exists()


@both
async def test_what_nobody_takes_is_removed_after_a_while(mode: EmbeddingTransferMode) -> None:
    async with Pair(mode, hold_seconds=0.0) as pair:
        request, _ = await pair.sender.send_embeddings(EMBEDDING)
        async with asyncio.timeout(30):
            while place_of(request).exists():
                await asyncio.sleep(0)
        assert pair.sender.waiting == 0


@both
async def test_a_closed_sender_has_given_its_receiver_a_moment_and_sends_no_more(mode: EmbeddingTransferMode) -> None:
    async with Pair(mode) as pair:
        request, _ = await pair.sender.send_embeddings(EMBEDDING)
        closing = asyncio.ensure_future(pair.sender.aclose(60))
        await asyncio.sleep(0)
        number, found = await pair.receiver.receive_embeddings(request)
        pair.receiver.release_tensor(number)
        await closing
        assert np.array_equal(found, EMBEDDING)
        with pytest.raises(WorkerUnavailable, match="closed"):
            await pair.sender.send_embeddings(EMBEDDING)


async def test_a_sender_that_is_closed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    sender = LocalEmbeddingSender()
    sending = asyncio.ensure_future(sender.send_embeddings(np.zeros(1 << 20, np.float32)))
    await asyncio.sleep(0)
    await sender.aclose(0)
    with pytest.raises(WorkerUnavailable, match="was closed"):
        await sending
    assert ours(tmp_path) == []


async def test_a_request_that_is_cancelled_while_its_embedding_is_written_leaves_nothing(tmp_path: Path) -> None:
    sender = LocalEmbeddingSender()
    sending = asyncio.ensure_future(sender.send_embeddings(np.zeros(1 << 20, np.float32)))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    async with asyncio.timeout(30):
        while sender.waiting or len(ours(tmp_path)) > 1:
            await asyncio.sleep(0.001)
    await sender.aclose()


async def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalEmbeddingSender(tmp_path / "absent")
    with pytest.raises(WorkerUnavailable, match="nothing can be handed over"):
        HeldFiles(tmp_path / "absent", "encoder_cache.1-a")
    place = tmp_path / "place"
    place.mkdir()
    sender = LocalEmbeddingSender(place)
    for left in place.iterdir():
        left.unlink()
    place.rmdir()
    with pytest.raises(Overloaded, match="could not be written"):
        await sender.send_embeddings(EMBEDDING)
    await sender.aclose()


@each_case("tensor", [object(), 3, "text", np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, complex)])
def test_what_is_not_a_tensor_of_numbers_is_refused(tensor: object) -> None:
    with pytest.raises(InvalidArgument):
        raw_tensor(tensor)


def test_without_numpy_a_tensor_is_a_view_with_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_tensor(memoryview(b"abcdefgh").cast("B", (2, 4)))
    half = raw_tensor(np.zeros(2, np.float16))
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    view = restored_tensor(raw)
    assert (view.shape, view.tolist()) == ((2, 4), [[97, 98, 99, 100], [101, 102, 103, 104]])
    with pytest.raises(InvalidArgument, match="NumPy is not installed"):
        restored_tensor(half)
    with pytest.raises(InvalidArgument, match="torch is not installed"):
        restored_tensor(RawTensor("torch.bfloat16", (1,), memoryview(bytearray(2))))


@pytest.mark.parametrize("mode", ["nixl-read", "nixl-write"])
def test_a_mode_over_nixl_says_what_to_use(mode: str) -> None:
    for factories in (EMBEDDING_SENDER_FACTORIES, EMBEDDING_RECEIVER_FACTORIES):
        assert set(factories) == set(EmbeddingTransferMode)
        with pytest.raises(InvalidArgument, match=rf"^{mode}: .*use local or shared-memory$"):
            factories[EmbeddingTransferMode(mode)]()


# -- leftovers -----------------------------------------------------------------------------------------------------------


async def test_a_dead_writers_files_are_removed_and_a_living_ones_stay(tmp_path: Path) -> None:
    living, dead = HeldFiles(tmp_path, "encoder_cache.7-a"), HeldFiles(tmp_path, "encoder_cache.7-b")
    kept = [await files.put(f"{files.stem}_0.x", (b"abc",)) for files in (living, dead)]
    (tmp_path / "encoder_cache.native_0.x").write_bytes(b"of a system without locks")
    lock = dead._lock
    assert lock is not None
    os.close(lock)  # as the end of its process does
    sweeper = Leftovers(tmp_path, "encoder_cache.")
    assert sweeper.sweep() == 1
    assert sweeper.sweep() == 0
    assert names_in(tmp_path) == [
        "encoder_cache.7-a.lock", "encoder_cache.7-a_0.x", "encoder_cache.native_0.x",
    ]  # fmt: skip
    assert kept[0].read_bytes() == b"abc"
    dead._lock = None
    await dead.aclose()
    await living.aclose()
    assert names_in(tmp_path) == ["encoder_cache.native_0.x"]


# -- processed media -----------------------------------------------------------------------------------------------------


async def test_processed_media_travel_under_the_names_of_the_guide() -> None:
    writer = MmKwargsShmWriter()
    message = await writer.write("image", [b"first", b"", memoryview(b"third")], ["a", "b", "c"])
    assert (message["modality"], message["mm_hashes"]) == ("image", ["a", "b", "c"])
    for place, item in enumerate(message["items"]):
        head, tail = item["name"].rsplit("_", 1)
        assert head.startswith(f"mm_kwargs_{os.getpid()}_")
        assert (len(head.split("_")[3]), int(tail)) == (12, place)
    assert (SHARED / message["items"][0]["name"]).read_bytes() == b"first"
    found = await read_mm_kwargs({"mm_kwargs_shm": message})
    assert found is not None
    assert (found.modality, [bytes(item) for item in found.items], found.mm_hashes) == (
        "image", [b"first", b"", b"third"], ["a", "b", "c"],
    )  # fmt: skip
    assert writer.waiting == 0
    assert await read_mm_kwargs({}) is None
    assert await read_mm_kwargs(None) is None
    await writer.aclose()


def changed(message: dict[str, Any], name: str) -> dict[str, Any]:
    first, *rest = message["items"]
    return {
        "an item that says more than there is": {**message, "items": [{**first, "size": 6}, *rest]},
        "a hash too few": {**message, "mm_hashes": ["a"]},
        "too much": {**message, "items": [{**first, "size": 1 << 40}, *rest]},
    }[name]


@pytest.mark.parametrize("name", ["an item that says more than there is", "a hash too few", "too much"])
async def test_a_wrong_message_is_refused_and_all_its_items_removed(name: str) -> None:
    writer = MmKwargsShmWriter()
    message = await writer.write("image", [b"first", b"other"], ["a", "b"])
    with pytest.raises(InvalidArgument):
        await read_mm_kwargs({"mm_kwargs_shm": changed(message, name)})
    assert writer.waiting == 0
    await writer.aclose()


async def test_a_message_without_one_of_its_items_is_an_error_that_another_worker_may_do_better() -> None:
    writer = MmKwargsShmWriter()
    message = await writer.write("image", [b"first", b"other"], ["a", "b"])
    (SHARED / message["items"][1]["name"]).unlink()
    with pytest.raises(Disconnected, match="is not there"):
        await read_mm_kwargs({"mm_kwargs_shm": message})
    assert writer.waiting == 0
    await writer.aclose()


@each_case("name", ["../../etc/passwd", "mm_kwargs_1_0123456789ab_0/x", "psm_1", "mm_kwargs_1_0123456789ab_0.lock"])
async def test_a_message_cannot_name_any_other_memory(name: str) -> None:
    message = {"modality": "image", "items": [{"name": name, "size": 1}], "mm_hashes": ["a"]}
    with pytest.raises(InvalidArgument, match="names shared memory of another kind"):
        await read_mm_kwargs({"mm_kwargs_shm": message})


async def test_a_message_is_written_whole_or_not_at_all() -> None:
    writer = MmKwargsShmWriter(max_bytes=8)
    with pytest.raises(Overloaded):
        await writer.write("image", [b"12345", b"12345"], ["a", "b"])
    assert writer.waiting == 0
    with pytest.raises(InvalidArgument, match="1 items and 2 hashes"):
        await writer.write("image", [b"1"], ["a", "b"])
    await writer.aclose()


async def test_the_memory_of_what_was_read_lives_as_long_as_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "encoder_cache.1-a_0.x"
    path.write_bytes(b"abcd")
    found = restored_tensor(RawTensor("uint8", (4,), TakenFile.open(path, maps=True).data))
    assert found.tolist() == [97, 98, 99, 100]
    assert not path.exists()


def test_a_receiver_removes_what_dead_senders_left(tmp_path: Path) -> None:
    for name in ("encoder_cache.9-z.lock", "encoder_cache.9-z_0.x"):
        (tmp_path / name).write_bytes(b"")
    LocalEmbeddingReceiver(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- decoded pixels ------------------------------------------------------------------------------------------------------


def test_the_hash_of_pixels_is_the_native_one() -> None:
    assert decoded_content_hash(raw_tensor(np.arange(6, dtype=np.uint8).reshape(1, 2, 3))) == "7a9bbcb11a898630"


@pytest.mark.parametrize(("channels", "left"), [(1, 1), (2, 1), (3, 3), (4, 3)])
async def test_pixels_travel_without_their_alpha(channels: int, left: int) -> None:
    writer, picture = DecodedMediaWriter(), np.arange(5 * 7 * channels, dtype=np.uint8).reshape(5, 7, channels)
    slot = await writer.write(picture, format="png")
    assert (slot["Decoded"]["shape"], slot["Decoded"]["dtype"]) == ([5, 7, left], "UINT8")
    found = await read_decoded_media(slot)
    assert np.array_equal(found.pixels, picture[:, :, :left])
    assert found.content_hash == decoded_content_hash(raw_tensor(np.ascontiguousarray(picture[:, :, :left])))
    assert found.metadata == {"format": "png", "color_type": "L" if left == 1 else "RGB", "layout": "HWC"}
    assert writer.waiting == 0
    with pytest.raises(Disconnected):
        await read_decoded_media(slot)
    await writer.aclose()


@each_case("picture", [np.zeros((2, 2), np.uint8), np.zeros((2, 2, 5), np.uint8), np.zeros((2, 2, 3), np.float32)])
async def test_what_is_not_a_picture_of_bytes_is_not_written(picture: object) -> None:
    writer = DecodedMediaWriter()
    with pytest.raises(InvalidArgument, match="decoded pixels are unsigned bytes"):
        await writer.write(picture, format="png")
    await writer.aclose()


async def test_a_slot_of_other_pixels_is_refused() -> None:
    writer, picture = DecodedMediaWriter(), np.zeros((2, 3, 3), np.uint8)
    memory = {"name": "dynamo_embedding.1-a_0.x", "size": 18}
    for change in (
        {"content_hash": "0" * 16},
        {"shape": [3, 3, 3]},
        {"dtype": "UINT16"},
        {"shared_memory": memory},
        None,
    ):
        slot = await writer.write(picture, format="png")
        with pytest.raises(InvalidArgument):
            await read_decoded_media({"Decoded": None if change is None else {**slot["Decoded"], **change}})
    await writer.aclose(0)

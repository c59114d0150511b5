"""Hundreds of cards at once, from whoever can write to discovery: streams of others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynamo.frontend.models.cards import CardBook, Scope
from dynamo.protocol.records import ModelCard, ModelRecord
from dynamo.runtime.discovery.base import MODEL_CARDS, Delete, Put
from dynamo.worker.registration import build_card, read_model_directory
from support.frontend_cluster import cluster, memory_runtime
from support.loop_gaps import gaps_of_the_loop
from support.tiny_model import write_tiny_model

CARDS = 300


def put(instance_id: int, model: str, card: ModelCard | None = None) -> Put:
    record = ModelRecord(
        namespace="ns",
        component="c",
        endpoint="e",
        instance_id=instance_id,
        card_json=(card or build_card(model)).to_json(),
    )
    return Put(f"{MODEL_CARDS}/{record.key}", record.encode())


@pytest.mark.parametrize("with_files", [False, True], ids=["names", "files"])
async def test_cards_that_arrive_by_the_hundred_do_not_hold_the_loop(tmp_path: Path, with_files: bool) -> None:
    assets = read_model_directory(write_tiny_model(tmp_path / "model")) if with_files else None
    async with cluster(tmp_path, inline=False) as house:
        await house.worker(model="good")
        runtime = memory_runtime()
        cards = [build_card(f"flood-{number}", assets=assets).to_json() for number in range(CARDS)]
        stop = asyncio.Event()
        watch = asyncio.create_task(gaps_of_the_loop(stop))
        try:
            for number, card in enumerate(cards):
                await runtime.endpoint(f"flood{number}.backend.generate").publish_model(card)
                await asyncio.sleep(0)  # the store is in this process
            async with asyncio.timeout(120):
                await house.frontend.models.wait_for(lambda: len(house.frontend.models.served()) == CARDS + 1)
        finally:
            stop.set()
            gaps = sorted(await watch)
            await runtime.aclose()
        assert (await house.client.chat("hi", model="good")).status == 200
    p99 = gaps[int(len(gaps) * 0.99)]
    print(f"{CARDS} cards: p99 gap {p99 * 1000:.1f} ms, longest {gaps[-1] * 1000:.1f} ms, {len(gaps)} gaps")
    assert p99 < 0.1  # below 10 ms; 1 to 3 s before


def test_models_beyond_the_bound_are_ignored_until_others_leave(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[str] = []
    book = CardBook(Scope(), max_groups=2, refused=refused.append)
    for number in range(4):
        book.apply([put(number, f"m{number}")])
    assert (sorted(key.model for key in book.keys), refused) == (["m0", "m1"], ["models", "models"])
    assert caplog.text.count("DYN_MAX_MODELS") == 1
    book.apply([put(9, "m1")])  # another worker of a model that is there
    book.apply([Delete(put(0, "m0").key), put(3, "m3")])
    assert sorted(key.model for key in book.keys) == ["m1", "m3"]


def test_a_card_of_megabytes_is_not_read() -> None:
    refused: list[str] = []
    book = CardBook(Scope(), refused=refused.append)
    card = build_card("m")
    card.user_data = "x" * 2_000_000
    assert book.apply([put(1, "m", card)]) == []
    assert refused == ["card_size"]

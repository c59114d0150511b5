"""Training the demonstration model, where PyTorch is installed (extra `train`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model.batches import Row
from demo_model.export import write_shards

from dynamo.reference.config import read_model_config
from dynamo.reference.core import Core
from dynamo.reference.loading import Options, load_core
from dynamo.reference.model import KvCache, Piece, make_batch

torch = pytest.importorskip("torch", reason="training needs the extra `train`")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
BATCH: list[Row] = [([5, 6, 7, 8, 9, 10], [False, False, False, True, True, True]), ([7, 8, 9], [False, True, True])]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def make_run(directory: Path, threads: int = 1) -> Any:
    from demo_model.network import Network
    from demo_model.train import Run

    torch.manual_seed(3)
    return Run.begin(Network(read_model_config(directory)), threads)


def logits_of(core: Core, tokens: list[int]) -> np.ndarray:
    batch = make_batch([Piece(tokens, 0, list(range(4)))], core.pool.block_size)
    return core.model.logits(core.model.forward(batch, KvCache(core.model.config, 4, core.pool.block_size)))


def test_what_is_trained_computes_what_the_engine_computes(directory: Path) -> None:
    run = make_run(directory)
    tensors = {name: p.detach().bfloat16().float() for name, p in run.network.named_parameters()}
    run.network.load_state_dict(tensors, strict=False)
    write_shards({name: values.numpy() for name, values in tensors.items()}, directory)
    tokens = list(range(3, 33))
    with torch.no_grad():
        wanted = run.network.logits(run.network(torch.tensor([tokens])))[0].numpy()
    found = logits_of(load_core(directory, Options(max_num_seqs=1)), tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_only_answers_are_targets_and_padding_is_none() -> None:
    from demo_model.train import padded

    tokens, targets = padded(BATCH)
    assert tokens.tolist() == [[5, 6, 7, 8, 9, 10], [7, 8, 9, 0, 0, 0]]
    assert targets.tolist() == [[-1, -1, 8, 9, 10, -1], [8, 9, -1, -1, -1, -1]]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(directory: Path) -> None:
    through, before, after = (make_run(directory) for _ in range(3))
    losses = [through.learn(BATCH, 1e-3)[0] for _ in range(6)]
    for _ in range(3):
        before.learn(BATCH, 1e-3)
    before.save(directory / "checkpoint.pt")
    after.load(directory / "checkpoint.pt")
    assert [after.learn(BATCH, 1e-3)[0] for _ in range(3)] == pytest.approx(losses[3:])
    assert losses[5] < losses[0]
    assert after.step == 6


def test_two_threads_learn_what_one_learns(directory: Path) -> None:
    one, two = make_run(directory), make_run(directory, threads=2)
    losses = [(one.learn(BATCH, 1e-3), two.learn(BATCH, 1e-3)) for _ in range(4)]
    assert [loss for _, (loss, _) in losses] == pytest.approx([loss for (loss, _), _ in losses], rel=1e-4)
    assert {learned for pair in losses for _, learned in pair} == {5}
    assert losses[3][0][0] < losses[0][0][0]


def test_finished_weights_are_taken_up_behind_the_step_that_made_them(directory: Path) -> None:
    first = make_run(directory)
    write_shards({name: p.detach().numpy() for name, p in first.network.named_parameters()}, directory)
    run = make_run(directory)
    run.learn(BATCH, 1e-3)
    run.take_up(directory)
    assert (run.step, run.next_pool) == (8900, 97)
    for name, parameter in run.network.named_parameters():
        wanted = dict(first.network.named_parameters())[name].detach().bfloat16().float()
        assert torch.equal(parameter.detach(), wanted)
        assert torch.equal(run.average[name], wanted)


def test_the_rate_rises_stays_and_falls_and_rises_five_times_more() -> None:
    from demo_model.train import PEAK_RATE, STEPS, rate_at

    rates = [rate_at(step) for step in range(STEPS)]
    assert rates[0] < PEAK_RATE / 10
    assert rates[60:4600] == pytest.approx([PEAK_RATE] * 4540)
    assert rates[4600:6500] == sorted(rates[4600:6500], reverse=True)
    again = (
        (0.6, 6500, 6560, 7150, 8000),
        (0.6, 8000, 8060, 8500, 8900),
        (0.4, 8900, 8960, 10700, 11390),
        (0.25, 11390, 11430, 11900, 12290),
        (0.2, 12290, 12320, 12650, STEPS),
    )
    for share, first, level, falls, last in again:
        assert rates[first] < PEAK_RATE / 10
        assert rates[level:falls] == pytest.approx([share * PEAK_RATE] * (falls - level))
        assert rates[falls:last] == sorted(rates[falls:last], reverse=True)
    assert 0 < rates[-1] < PEAK_RATE / 10


def test_a_step_turns_every_matrix_by_the_same_amount_in_every_direction() -> None:
    from demo_model.muon import orthogonal

    torch.manual_seed(5)
    turned = orthogonal(torch.randn(3, 12, 30))
    values = torch.linalg.svdvals(turned)
    assert values.shape == (3, 12)
    assert 0.5 < float(values.min()) < float(values.max()) < 1.5


def test_what_learns_to_see_computes_what_the_engine_computes(tmp_path: Path) -> None:
    from random import Random

    from demo_model.lessons.pictures import picture
    from demo_model.sight import Sight

    from dynamo.reference.picture_codes import PictureCodes, scaled

    torch.manual_seed(2)
    sight = Sight()
    rng = Random(3)
    images = np.stack([scaled(picture(rng).pixels()) for _ in range(24)])
    sight(torch.from_numpy(images))  # the norms learn what is usual
    sight.eval()
    weights = sight.export()
    engine = PictureCodes(0, 40, "", weights)
    with torch.no_grad():
        wanted = sight(torch.from_numpy(images)).flatten(1).numpy()
    for image, row in zip(images, wanted, strict=True):
        np.testing.assert_allclose(engine.scores(image), row, atol=1e-4)


def test_low_rank_weights_that_are_learned_compute_what_the_engine_computes(directory: Path) -> None:
    from demo_model.export import write_tensors
    from demo_model.looking import Looking
    from demo_model.sight import Sight

    run = make_run(directory)
    tensors = {name: p.detach().bfloat16().float() for name, p in run.network.named_parameters()}
    run.network.load_state_dict(tensors, strict=False)
    write_shards({name: values.numpy() for name, values in tensors.items()}, directory)
    looking = Looking(run.network, read_model_config(directory))
    with torch.no_grad():
        for parameter in looking.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16().float())
    learned = looking.export({name: p.detach() for name, p in looking.named_parameters()})
    sight = {name: values.astype(np.float32) for name, values in Sight().export().items()}
    write_tensors(sight | learned, directory / "vision.safetensors")
    config = {**CONFIG, "image_token_id": 0, "vision_config": {"model_type": "picture_codes", "first_token_id": 40}}
    (directory / "config.json").write_text(json.dumps(config))
    tokens = [3, 4, 5, *range(40, 56), 6, 7, 8]
    with torch.no_grad():
        wanted = looking(torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool)).numpy()
    core = load_core(directory, Options(max_num_seqs=1))
    piece = Piece(tokens, 0, list(range(4)), None, core.model.weights.sight, 3)
    batch = make_batch([piece], core.pool.block_size)
    found = core.model.logits(core.model.forward(batch, KvCache(core.model.config, 4, core.pool.block_size)))
    np.testing.assert_allclose(found, wanted, atol=1e-3)

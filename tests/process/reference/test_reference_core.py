"""Whole requests through the core: what a request answers does not depend on what else happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.errors import InvalidArgument
from dynamo.reference.core import Core, Emission, Failure, RunningChoice
from dynamo.reference.loading import Options, load_core
from dynamo.reference.model import KvCache, Piece, TransformerModel, make_batch
from dynamo.reference.request import read_request

CoreOf = Callable[..., Core]


def request(tokens: list[int], max_tokens: int = 24, **sampling: Any) -> dict[str, Any]:
    return {
        "token_ids": tokens,
        "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0, **sampling},
    }


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, length).tolist()


# Prompts of all lengths around a block's (4), some with a common beginning, greedy and not.
MIXED = [
    request(
        prompt(24, 5)[: 8 + n % 16] + prompt(n % 16, n) if n % 3 == 0 else prompt(1 + 3 * n % 60, n),
        8 + n % 16,
        **({"temperature": 0.8, "seed": n, "top_p": 0.9} if n % 4 == 1 else {}),
        **({"repetition_penalty": 1.3, "frequency_penalty": 0.5} if n % 5 == 2 else {}),
    )
    for n in range(32)
]


ALONE: dict[str, list[list[list[int]]]] = {}  # by model: computed once, one request after the other


def answers(core: Core, requests: list[dict[str, Any]], *, together: bool = True) -> list[list[list[int]]]:
    """The tokens of every choice of every request."""
    return [
        [[emission.drawn.token for emission in choice if emission.shown] for choice in one]
        for one in emissions(core, requests, together=together)
    ]


def emissions(core: Core, requests: list[dict[str, Any]], *, together: bool = True) -> list[list[list[Emission]]]:
    found: dict[int, list[Emission]] = {}
    handles = []
    for body in requests:
        handles.append(core.add(read_request(body, core.limits)))
        while not together and not core.is_idle:
            collect(core, found)
    while not core.is_idle:
        collect(core, found)
    assert core.pool.held == 0
    return [[found.get(id(choice), []) for choice in choices] for choices in handles]


def collect(core: Core, found: dict[int, list[Emission]]) -> None:
    for emission in core.step():
        assert not isinstance(emission, Failure)
        found.setdefault(id(emission.choice), []).append(emission)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens": 16, "sequences": 16},  # long prompts in pieces
        {"step_tokens": 3, "sequences": 3},
        {"prefix_caching": False},
        {"blocks": 22},  # too few for all: sequences give way and start again
        {"blocks": 22, "prefix_caching": False, "step_tokens": 17, "sequences": 16},
    ],
)
def test_an_answer_is_the_same_alone_and_in_any_batch(name: str, options: dict[str, Any], core_of: CoreOf) -> None:
    if name not in ALONE:
        ALONE[name] = answers(core_of(name, prefix_caching=False), MIXED, together=False)
    for body, (wanted,), (found,) in zip(MIXED, ALONE[name], answers(core_of(name, **options), MIXED), strict=True):
        assert_same(body, wanted, found, core_of(name).model)


def assert_same(body: dict[str, Any], wanted: list[int], found: list[int], model: TransformerModel) -> None:
    """Equal; or, on a machine that rounds differently, equal up to a tie of the two best tokens."""
    if wanted == found:
        return
    at = next(n for n, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1])
    tokens = [*body["token_ids"], *wanted[:at]]
    blocks = list(range(len(tokens) // 4 + 1))
    hidden = model.forward(make_batch([Piece(tokens, 0, blocks)], 4), KvCache(model.config, len(blocks), 4))
    second, first = np.sort(model.logits(hidden[-1:])[0])[-2:]
    print(f"token {at} of {len(wanted)} differs: the two best logits are {first} and {second}")
    assert body["sampling_options"]["temperature"] == 0
    assert not ({"repetition_penalty", "frequency_penalty"} & set(body["sampling_options"]))
    assert first - second < 1e-4


def test_the_small_cache_really_makes_sequences_give_way(core_of: CoreOf) -> None:
    core = core_of(blocks=22)
    handles = [choice for body in MIXED for choice in core.add(read_request(body, core.limits))]
    while not core.is_idle:
        core.step()
    assert sum(choice.sequence.preemptions for choice in handles) > 3


def test_a_second_time_most_of_the_prompt_is_found_and_the_answer_is_the_same(core_of: CoreOf) -> None:
    core, long = core_of(), request(prompt(50))
    first = answers(core, [long])
    second = emissions(core, [long])
    assert [[e.drawn.token for e in second[0][0]]] == first[0]
    assert second[0][0][0].choice.sequence.cached == 48
    assert core.hit_rate == 48 / 100


def test_another_tenants_prompt_is_not_found(core_of: CoreOf) -> None:
    core, body = core_of(), request(prompt(50))
    answers(core, [body])
    other = emissions(core, [{**body, "routing": {"cache_salt": "other"}}])
    assert other[0][0][0].choice.sequence.cached == 0


def test_a_continued_request_goes_on_as_the_first_worker_would_have(core_of: CoreOf) -> None:
    body = request(prompt(11), 20, temperature=1.0, seed=42)
    (whole,) = answers(core_of(), [body])[0]
    continued = request([*body["token_ids"], *whole[:7]], 13, temperature=1.0, seed=42)
    assert answers(core_of(), [continued])[0] == [whole[7:]]


def test_choices_differ_and_each_is_what_its_seed_says(core_of: CoreOf) -> None:
    body = request(prompt(9), 12, temperature=1.0, seed=3, n=3)
    together = answers(core_of(), [body])[0]
    assert len({tuple(tokens) for tokens in together}) == 3
    assert answers(core_of(), [body, *MIXED])[0] == together


def test_log_probabilities_add_up_and_those_of_the_prompt_do_not_depend_on_the_pieces(core_of: CoreOf) -> None:
    body = {**request(prompt(21), 4), "output_options": {"logprobs": 3, "prompt_logprobs": 2}}
    entries = []
    for step_tokens in (64, 5):
        core = core_of(step_tokens=step_tokens, sequences=2)
        answers(core, [body])  # fills the prefix cache, which must not hide positions
        ((stream,),) = emissions(core, [body])
        assert all(len(e.drawn.top) == 3 and e.drawn.top[0] == (e.drawn.token, e.drawn.logprob) for e in stream)
        entries.append(stream[-1].choice.prompt_entries)
        assert [entry[0][0] for entry in entries[-1]] == body["token_ids"][1:]
        assert all(2 <= len(entry) <= 3 for entry in entries[-1])
    flat = [[value for entry in one for _, _, value in entry] for one in entries]
    at_once, in_steps = flat
    assert np.allclose(at_once, in_steps, atol=1e-4)


def test_a_prompt_that_is_computed_twice_is_reported_once(core_of: CoreOf) -> None:
    core = core_of(blocks=22)
    bodies = [{**body, "output_options": {"prompt_logprobs": 0}} for body in MIXED]
    handles = [choice for body in bodies for choice in core.add(read_request(body, core.limits))]
    while not core.is_idle:
        core.step()
    assert sum(choice.sequence.preemptions for choice in handles) > 3
    for choice, body in zip(handles, bodies, strict=True):
        assert [entry[0][0] for entry in choice.prompt_entries] == body["token_ids"][1:]


def test_stop_tokens_end_a_sequence_and_only_the_visible_ones_are_shown(core_of: CoreOf) -> None:
    body = request(prompt(8), 30)
    (plain,) = answers(core_of(), [body])[0]
    at = next(n for n, token in enumerate(plain) if n > 2 and token not in plain[:n])
    for name, shown, reason in (
        ("stop_token_ids", 0, "stop"),
        ("stop_token_ids_visible", 1, "stop"),
        ("stop_token_ids_hidden", 0, "eos"),
    ):
        stops = {"max_tokens": 30, name: [plain[at]]}
        ((stream,),) = emissions(core_of(), [{**body, "stop_conditions": stops}])
        assert [e.drawn.token for e in stream if e.shown] == plain[: at + shown]
        assert [e.reason for e in stream] == [None] * at + [reason]
        stops = {"max_tokens": 30, "min_tokens": at + 2, name: [plain[at]]}
        ((stream,),) = emissions(core_of(), [{**body, "stop_conditions": stops}])
        assert plain[at] not in [e.drawn.token for e in stream[: at + 2]]


@pytest.mark.parametrize("max_tokens", [None, 0, 11, 10_000])
def test_without_a_limit_or_over_it_an_answer_fills_the_context(max_tokens: int | None, core_of: CoreOf) -> None:
    core, stops = core_of(blocks=10), {"ignore_eos": True, "max_tokens": max_tokens}
    ((tokens,),) = answers(core, [{**request(prompt(30)), "stop_conditions": stops}])
    assert len(tokens) == 10


def test_options_without_a_member_of_their_own_are_obeyed(core_of: CoreOf) -> None:
    def said(**options: Any) -> list[int]:
        return answers(core_of(), [{**request(prompt(8), 12), "extra_args": {"sampling_options": options}}])[0][0]

    plain = said()
    assert said(logit_bias={str(plain[0]): -100})[0] != plain[0]
    assert set(said(allowed_token_ids=[3, 4])) <= {3, 4}
    assert said(bad_words_token_ids=[plain[1:3]])[:3] != plain[:3]
    assert said(bad_words_token_ids=[plain[1:3]])[:2] == plain[:2]


def test_the_models_author_decides_where_a_request_is_silent(
    save_model: Callable[..., Path], configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    directory = save_model(tmp_path / "model", configs["llama"])
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    (directory / "generation_config.json").write_text(json.dumps(wanted))
    limits = load_core(directory, Options()).limits
    silent = read_request({"token_ids": [5]}, limits).sampling
    assert {name: getattr(silent, name) for name in wanted} == wanted
    assert read_request({"token_ids": [5], "sampling_options": {"top_k": -1}}, limits).sampling.top_k == 0
    (directory / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    assert read_request({"token_ids": [5]}, load_core(directory, Options()).limits).sampling.temperature == 0
    (directory / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(InvalidArgument, match=r"generation_config\.json: top_p must be a number"):
        load_core(directory, Options())


def test_a_thousand_aborts_in_any_state_leave_every_block_free(core_of: CoreOf) -> None:
    rng = np.random.default_rng(3)
    core = core_of(blocks=24, sequences=4, step_tokens=9)
    live: list[list[RunningChoice]] = []
    aborted = given_way = 0
    while aborted < 1000:
        while len(live) < 8:
            body = request(prompt(int(rng.integers(1, 40)), 1), 40, n=int(rng.integers(1, 3)))
            live.append(core.add(read_request(body, core.limits)))
        for _ in range(int(rng.integers(0, 3))):
            core.step()
        choices = live.pop(int(rng.integers(len(live))))
        given_way += sum(choice.sequence.preemptions for choice in choices)
        if not all(choice.sequence.is_finished for choice in choices):
            aborted += 1
        core.abort(choices)
        if aborted % 100 == 0:
            for choices in live:
                core.abort(choices)
            live.clear()
            assert (core.is_idle, core.pool.held, core.pool.available) == (True, 0, 24)
    assert given_way > 3


BAD = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [97]}, "token_ids holds 97"),
    ({"token_ids": [1] * 256}, "the prompt has 256 tokens"),
    ({"sampling_options": {"temperature": -1}}, "sampling_options.temperature"),
    ({"sampling_options": {"temperature": float("nan")}}, "sampling_options.temperature"),
    ({"sampling_options": {"top_p": 0}}, "sampling_options.top_p"),
    ({"sampling_options": {"top_k": -2}}, "sampling_options.top_k"),
    ({"sampling_options": {"min_p": 1.1}}, "sampling_options.min_p"),
    ({"sampling_options": {"n": 0}}, "sampling_options.n"),
    ({"sampling_options": {"best_of": 2}}, "sampling_options.best_of"),
    ({"sampling_options": {"seed": 2**63}}, "sampling_options.seed"),
    ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
    ({"sampling_options": {"guided_decoding": {"regex": 5}}}, "guided_decoding.regex"),
    ({"sampling_options": {"guided_decoding": []}}, "guided_decoding must be an object"),
    ({"sampling_options": [1]}, "sampling_options must be an object"),
    ({"stop_conditions": {"max_tokens": -1}}, "stop_conditions.max_tokens"),
    ({"stop_conditions": {"stop_token_ids": ["x"]}}, "stop_conditions.stop_token_ids"),
    ({"stop_conditions": {"max_thinking_tokens": -5}}, "stop_conditions.max_thinking_tokens"),
    ({"extra_args": {"sampling_options": {"logit_bias": {"x": 1}}}}, "logit_bias"),
    ({"extra_args": {"sampling_options": {"logit_bias": {"97": 1}}}}, "logit_bias holds the token 97"),
    ({"extra_args": {"sampling_options": {"logit_bias": {"5": 101}}}}, "logit_bias for token 5"),
    ({"extra_args": {"sampling_options": {"allowed_token_ids": [97]}}}, "allowed_token_ids"),
    ({"extra_args": {"sampling_options": {"bad_words_token_ids": [[]]}}}, "bad_words_token_ids"),
    ({"extra_args": {"sampling_options": {"suffix": "x"}}}, "suffix"),
    ({"output_options": {"logprobs": 21}}, "output_options.logprobs"),
    ({"bootstrap_info": {"bootstrap_room": 1}}, "bootstrap_info"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[named for _, named in BAD])
def test_a_request_that_cannot_be_served_is_refused_by_field(
    change: dict[str, Any], named: str, core_of: CoreOf
) -> None:
    with pytest.raises(InvalidArgument, match=named.replace(".", r"\.")):
        read_request({"token_ids": [1], **change}, core_of().limits)

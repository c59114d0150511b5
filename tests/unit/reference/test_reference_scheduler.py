"""The scheduler over random lives of sequences, and the promises one can name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.kv.hashing import block_hashes, sequence_hashes
from dynamo.reference.blocks import BlockPool, BlocksStored
from dynamo.reference.scheduler import Scheduler, Sequenced, Work
from support.properties import examples

SIZE = 4


def scheduler(blocks: int = 64, sequences: int = 4, step_tokens: int = 16, *, caching: bool = True) -> Scheduler:
    pool = BlockPool(blocks, SIZE, prefix_caching=caching)
    return Scheduler(pool, max_sequences=sequences, max_step_tokens=step_tokens)


def run(step: Scheduler, plan: list[Work], token: int = 7) -> None:
    for work in plan:
        step.computed(work, token if work.samples else None)


@examples(150)
@given(st.data())
@pytest.mark.process  # computes for seconds
def test_no_life_of_sequences_leaks_a_block_exceeds_a_budget_or_loses_a_token(data: st.DataObject) -> None:
    blocks, sequences = data.draw(st.integers(4, 14)), data.draw(st.integers(1, 4))
    budget = data.draw(st.integers(sequences, 12))
    step = scheduler(blocks, sequences, budget, caching=data.draw(st.booleans()))
    room = blocks * SIZE
    wanted: dict[Sequenced, list[int]] = {}  # what each will have been when it ends
    live: list[Sequenced] = []
    todo = data.draw(st.integers(1, 10))
    for _ in range(2000):
        if todo and data.draw(st.integers(0, 2)) == 0:
            todo -= 1
            prompt = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, room - 2))
            longer = data.draw(st.integers(1, min(12, room - 1 - len(prompt))))
            sequence = Sequenced(list(prompt), priority=data.draw(st.integers(0, 1)))
            wanted[sequence] = prompt + [9] * longer
            step.add(sequence)
            live.append(sequence)
        if live and data.draw(st.integers(0, 30)) == 0:
            step.finish(live.pop(data.draw(st.integers(0, len(live) - 1))))
        plan = step.plan()
        assert bool(plan) == bool(live)
        assert sum(work.count for work in plan) <= budget
        assert len({id(work.sequence) for work in plan}) == len(plan) <= step.running <= sequences
        for work in plan:
            sequence = work.sequence
            assert work.start == sequence.computed
            assert len(sequence.blocks) * SIZE >= work.start + work.count
        # A block being written belongs to one sequence only.
        written = [w.sequence.blocks[at // SIZE] for w in plan for at in range(w.start, w.start + w.count, 1)]
        owners = {block: sum(block in s.blocks for s in live) for block in written}
        assert set(owners.values()) <= {1}
        for work in plan:
            step.computed(work, 9 if work.samples else None)
            if work.sequence.tokens == wanted[work.sequence]:
                step.finish(work.sequence)
                live.remove(work.sequence)
        if not live and not todo:
            break
    else:
        pytest.fail("the sequences did not end")
    assert step.is_idle
    assert step.pool.held == 0
    assert step.pool.available == blocks


@examples(150)
@given(st.data())
def test_no_life_in_two_workers_leaks_a_block_or_waits_for_nobody(data: st.DataObject) -> None:
    """Prompts that arrive from elsewhere or fail to, and blocks that are kept for others, in any order."""
    blocks, sequences = data.draw(st.integers(4, 14)), data.draw(st.integers(1, 4))
    step = scheduler(blocks, sequences, 12, caching=data.draw(st.booleans()))
    live: dict[Sequenced, int] = {}  # the length each will have when it ends
    receiving: list[Sequenced] = []
    kept: list[Sequenced] = []
    todo = data.draw(st.integers(1, 10))
    for _ in range(3000):
        if todo and data.draw(st.integers(0, 2)) == 0:
            todo -= 1
            prompt = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, blocks * SIZE - 2))
            sequence = Sequenced(prompt, priority=data.draw(st.integers(0, 1)), arrives=data.draw(st.booleans()))
            live[sequence] = min(len(prompt) + data.draw(st.integers(1, 12)), blocks * SIZE - 1)
            step.add(sequence)
        if live and data.draw(st.integers(0, 30)) == 0:
            left = data.draw(st.sampled_from(list(live)))
            step.finish(left)
            del live[left]
        plan = [] if step.is_idle else step.plan()
        receiving += step.take_reserved()
        # What is being written belongs to nobody else, here or elsewhere.
        others = [block for sequence in (*kept, *receiving) for block in sequence.blocks[sequence.computed // SIZE :]]
        assert not set(others) & {block for work in plan for block in written(work)}
        for work in plan:
            assert not work.sequence.arrives
            step.computed(work, 9 if work.samples else None)
            if len(work.sequence.tokens) == live[work.sequence]:
                del live[work.sequence]
                keep = data.draw(st.booleans())
                step.finish(work.sequence, keep=keep)
                if keep:
                    assert len(work.sequence.blocks) * SIZE >= work.sequence.computed
                    kept.append(work.sequence)
        # Somebody outside does something, at the latest when nobody here can.
        must = step.is_idle and not plan
        if receiving and (must or data.draw(st.booleans())):
            arrived = receiving.pop()
            step.received(arrived, data.draw(st.sampled_from([0, len(arrived.tokens) - 1])))
        elif kept and (must or data.draw(st.booleans())):
            step.finish(kept.pop(0))
        elif must and not todo:
            break
    else:
        pytest.fail("the sequences did not end")
    assert live == {}
    assert (step.pool.held, step.pool.available) == (0, blocks)


def written(work: Work) -> set[int]:
    return {work.sequence.blocks[at // SIZE] for at in range(work.start, work.start + work.count)}


def test_a_long_prompt_is_computed_in_pieces_beside_those_who_generate() -> None:
    step = scheduler()
    first, long = Sequenced([1]), Sequenced([2] * 40)
    step.add(first)
    run(step, step.plan())
    step.add(long)
    counts = []
    for _ in range(4):
        plan = step.plan()
        counts.append({("first" if work.sequence is first else "long"): work.count for work in plan})
        run(step, plan)
    assert counts[:3] == [{"first": 1, "long": 15}, {"first": 1, "long": 15}, {"first": 1, "long": 10}]
    assert counts[3] == {"first": 1, "long": 1}


def test_whoever_generates_goes_on_beside_a_prompt_of_higher_priority() -> None:
    step = scheduler(step_tokens=4)
    first, urgent = Sequenced([1]), Sequenced([2] * 30, priority=9)
    step.add(first)
    run(step, step.plan())
    step.add(urgent)
    for _ in range(5):
        plan = step.plan()
        assert {work.sequence: work.count for work in plan} == {first: 1, urgent: 3}
        run(step, plan)


def test_priority_goes_before_arrival_and_nobody_is_skipped() -> None:
    step = scheduler(sequences=1)
    early, late, urgent = Sequenced([1]), Sequenced([2]), Sequenced([3], priority=5)
    for sequence in (early, late, urgent):
        step.add(sequence)
    order = []
    while plan := step.plan():
        order.append(plan[0].sequence)
        step.finish(plan[0].sequence)
    assert order == [urgent, early, late]


def test_when_blocks_run_out_the_newest_gives_way_and_keeps_its_tokens() -> None:
    step = scheduler(blocks=4, caching=False)
    old, new = Sequenced([1] * 7), Sequenced([2] * 7)
    step.add(old)
    step.add(new)
    run(step, step.plan())  # both have 8 tokens now, in 2 blocks each
    run(step, step.plan())
    urgent = Sequenced([3], priority=1)
    step.add(urgent)
    plan = step.plan()
    assert [work.sequence for work in plan] == [old]  # nor does a newcomer get what was just taken away
    assert (new.preemptions, new.blocks, new.computed, new.tokens) == (1, [], 0, [2] * 7 + [7] * 2)
    run(step, plan)
    step.finish(old)
    step.finish(urgent)
    (work,) = step.plan()
    assert (work.sequence, work.start, work.count) == (new, 0, 9)


def test_a_prefix_is_computed_once_and_its_last_token_always() -> None:
    step = scheduler()
    first = Sequenced([3] * 8)
    step.add(first)
    run(step, step.plan())
    same, longer = Sequenced([3] * 8), Sequenced([3] * 8 + [4])
    step.add(same)
    step.add(longer)
    starts = {work.sequence: work.start for work in step.plan()}
    assert (starts[same], starts[longer]) == (4, 8)
    assert (same.cached, longer.cached) == (4, 8)
    assert longer.blocks[:2] == first.blocks[:2]


def test_blocks_are_named_as_the_router_names_them_also_those_that_were_generated() -> None:
    step = scheduler()
    sequence = Sequenced([5, 6, 7, 8, 9])
    step.add(sequence)
    for token in range(20, 30):
        run(step, step.plan(), token)
    stored = [event for event in step.pool.take_events() if isinstance(event, BlocksStored)]
    names = sequence_hashes(block_hashes(sequence.tokens[:12], SIZE))
    assert [event.block_hash for event in stored] == names
    assert [event.parent_hash for event in stored] == [None, *names[:-1]]
    assert [token for event in stored for token in event.token_ids] == sequence.tokens[:12]


def test_an_abort_frees_the_blocks_at_once_wherever_the_sequence_is() -> None:
    step = scheduler(sequences=1)
    running, waiting = Sequenced([1] * 20), Sequenced([2] * 5)
    step.add(running)
    step.add(waiting)
    step.plan()
    for sequence in (running, waiting, running):
        step.finish(sequence)
    assert step.pool.held == 0
    assert step.is_idle
    assert step.plan() == []


@pytest.mark.parametrize("length", [0, 16, 100])
def test_a_prompt_that_could_never_run_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgument, match=r"KV blocks|empty"):
        scheduler(blocks=4).add(Sequenced([1] * length))


def test_a_step_has_room_for_everybody_who_generates() -> None:
    with pytest.raises(InvalidArgument, match="at least the 8 sequences"):
        scheduler(sequences=8, step_tokens=7)

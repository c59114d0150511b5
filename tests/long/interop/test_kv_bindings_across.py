"""Hashes and trees of blocks: the native module and ours, asked the same."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from typing import Any, Final

import pytest

from dynamo._core import RadixTree, compute_block_hash_for_seq
from dynamo.kv.hashing import sequence_hashes
from support.native_frontend import NATIVE_PYTHON, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(120),
]

NATIVE: Final = """
import json, sys
from dynamo._core import RadixTree, compute_block_hash_for_seq
asked = json.load(sys.stdin)
hashes = [compute_block_hash_for_seq(*question) for question in asked["hashes"]]
answers = []
for steps in asked["trees"]:
    tree = RadixTree()
    for kind, worker, body in steps:
        if kind == "event":
            try:
                tree.apply_event(worker, json.dumps(body).encode())
                answers.append("ok")
            except RuntimeError as error:
                answers.append(str(error))
        elif kind == "find":
            scores = tree.find_matches(body).scores
            answers.append(sorted([*rank, depth] for rank, depth in scores.items()))
        else:
            getattr(tree, kind)(worker)
    dumped = [json.loads(text) for text in tree.dump_tree_as_events()]
    answers.append(sorted(row for event in dumped for row in rows(event)))
print(json.dumps({"hashes": hashes, "answers": answers}))
"""

ROWS: Final = """
def rows(event):
    stored, parent, found = event["event"]["data"]["stored"], 0, []
    parent = stored["parent_hash"] or 0
    for block in stored["blocks"]:
        found.append([event["worker_id"], event["event"]["dp_rank"], parent, block["block_hash"], block["tokens_hash"]])
        parent = block["block_hash"]
    return found
"""


def ask_native(question: dict[str, Any]) -> dict[str, Any]:
    command = [NATIVE_PYTHON, "-c", ROWS + NATIVE]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def random_questions(rng: random.Random) -> list[list[Any]]:
    """Return arguments of compute_block_hash_for_seq."""
    questions: list[list[Any]] = []
    for _ in range(300):
        tokens = [rng.getrandbits(32) for _ in range(rng.choice((0, 1, 15, 16, 17, 100)))]
        media = None
        if rng.random() < 0.4:
            media = [
                {"mm_objects": [{"mm_hash": rng.getrandbits(64), "offsets": []} for _ in range(rng.randrange(3))]}
                if rng.random() < 0.7
                else None
                for _ in range(rng.randrange(8))
            ]
        lora = rng.choice((None, "", "adapter", "ä"))
        salt = rng.choice((None, "", "tenant", "adapter"))
        questions.append([tokens, rng.choice((1, 4, 16)), media, lora, rng.choice((None, False, True)), salt])
    return questions


def random_steps(rng: random.Random) -> list[list[Any]]:
    """Return what is done to one tree: blocks come, go and come again, in any order, also without their parents.

    A name means one block, as with every engine. What the native tree makes of names that change their meaning depends
    on how its edges were compressed before.
    """
    steps: list[list[Any]] = []
    for _ in range(60):
        worker, rank = rng.randrange(2), rng.randrange(2)
        path = [rng.randrange(1, 3) for _ in range(5)]
        names = sequence_hashes([number + 1 for number in path])
        start = rng.randrange(5)
        end = rng.randrange(start, 6)
        kind = rng.random()
        data: Any
        if kind < 0.55:
            blocks = [
                {"block_hash": name, "tokens_hash": own}
                for name, own in zip(names[start:end], path[start:end], strict=True)
            ]
            parent = names[rng.choice((start - 1, start))] if 0 < start < 5 else None  # at times its own parent
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        elif kind < 0.85:
            data = {"removed": {"block_hashes": names[start:end]}}
        elif kind < 0.88:
            data = "cleared"
        else:
            steps.append([rng.choice(("remove_worker", "clear_all_blocks")), worker, None])
            continue
        steps.append(["event", worker, {"event_id": 1, "data": data, "dp_rank": rank}])
        steps.append(["find", worker, path[: rng.randrange(1, 6)]])
    return steps


def ours(trees: list[list[list[Any]]], rows: Callable[[dict[str, Any]], list[Any]]) -> list[Any]:
    answers: list[Any] = []
    for steps in trees:
        tree = RadixTree()
        for kind, worker, body in steps:
            if kind == "event":
                try:
                    tree.apply_event(worker, json.dumps(body).encode())
                    answers.append("ok")
                except RuntimeError as error:
                    answers.append(str(error))
            elif kind == "find":
                scores = tree.find_matches(body).scores
                answers.append(sorted([*rank, depth] for rank, depth in scores.items()))
            else:
                getattr(tree, kind)(worker)
        answers.append(sorted(row for text in tree.dump_tree_as_events() for row in rows(json.loads(text))))
    return answers


def test_hashes_and_trees_equal_the_native_ones() -> None:
    rng = random.Random(20)
    questions, trees = random_questions(rng), [random_steps(rng) for _ in range(60)]
    native = ask_native({"hashes": questions, "trees": trees})
    assert native["hashes"] == [compute_block_hash_for_seq(*question) for question in questions]
    names: dict[str, Any] = {}
    exec(ROWS, names)
    found = ours(trees, names["rows"])
    differing = [number for number, (one, two) in enumerate(zip(native["answers"], found, strict=True)) if one != two]
    assert not differing, f"{len(differing)} of {len(found)}: {native['answers'][differing[0]]}, {found[differing[0]]}"

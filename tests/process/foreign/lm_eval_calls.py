"""lm-eval over completions of a server, and over another judge of the same model. Run by `test_lm_eval.py`.

    lm_eval_calls.py hf URL MODEL DIRECTORY       against transformers, which loads the directory
    lm_eval_calls.py server URL MODEL OTHER-URL   against another server: texts alone

The items are made here, so that nothing is downloaded. It prints one line of JSON: how many items there were, and what differed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

ITEMS = 32
NEAR = 1e-3  # of a sum of log probabilities, in float32 on two ways through the same weights
TEMPLATE = "<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n"


def questions() -> list[dict[str, Any]]:
    """Return items: a question, four answers, and which is right."""
    items = []
    for number in range(ITEMS):
        one, other = 11 + 2 * number % 40, 7 + 3 * number % 30
        right = one + other
        answers = [str(right + step) for step in (0, 1, 10, -2)]
        items.append({"question": f"What is {one} + {other}?", "answers": answers, "right": 0, "text": answers[0]})
    return items


def tasks(file: Path, kinds: list[str]) -> list[dict[str, Any]]:
    """Return the local tasks of lm-eval: choices by their log probability, texts, and the log probability of a whole text."""
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    common: dict[str, Any] = {**data, "metadata": {"version": 1}, "num_fewshot": 0}
    known: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice", "doc_to_text": TEMPLATE, "doc_to_choice": "answers", "doc_to_target": "right",
            "target_delimiter": "", "metric_list": [{"metric": "acc"}],
        },
        "texts": {
            "output_type": "generate_until", "doc_to_text": TEMPLATE, "doc_to_target": "text",
            "generation_kwargs": {"until": ["<|im_end|>", "\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
            "metric_list": [{"metric": "exact_match"}],
        },
        "whole": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": TEMPLATE + "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    }  # fmt: skip
    return [{"task": kind, **common, **known[kind]} for kind in kinds]


def answers(model: Any, file: Path, kinds: list[str]) -> dict[str, list[Any]]:
    """Run the tasks; return the raw answers by task, in the order of the items."""
    done = simple_evaluate(
        model=model, tasks=tasks(file, kinds), log_samples=True, bootstrap_iters=0, random_seed=1, numpy_random_seed=1
    )
    return {
        kind: [sample["resps"] for sample in sorted(done["samples"][kind], key=lambda sample: sample["doc_id"])]
        for kind in kinds
    }


def is_same(one: Any, other: Any) -> bool:
    """Return whether two raw answers are the same, numbers nearly."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return abs(one - float(other)) < NEAR
    return bool(one == other)


def main() -> None:
    judge, url, model, other = sys.argv[1:]
    address = {"base_url": f"{url}/v1/completions", "model": model, "num_concurrent": 4, "max_retries": 1}
    served: Any
    own: Any
    if judge == "hf":
        from lm_eval.models.huggingface import HFLM

        kinds = ["choices", "texts", "whole"]
        served = LocalCompletionsAPI(tokenizer=other, tokenizer_backend="huggingface", **address)
        own = HFLM(pretrained=other, device="cpu", dtype="float32", batch_size=1)
    else:
        kinds = ["texts"]
        plain = {**address, "tokenizer_backend": None, "tokenized_requests": False}
        served = LocalCompletionsAPI(**plain)
        own = LocalCompletionsAPI(**{**plain, "base_url": f"{other}/v1/completions"})
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "items.json")
        file.write_text("\n".join(json.dumps(item) for item in questions()))
        first, second = answers(served, file, kinds), answers(own, file, kinds)
    differing = [
        [kind, number, one, two]
        for kind in kinds
        for number, (one, two) in enumerate(zip(first[kind], second[kind], strict=True))
        if not is_same(one, two)
    ]
    texts = len({json.dumps(each) for each in first["texts"]})
    print(json.dumps({"items": {kind: len(first[kind]) for kind in kinds}, "texts": texts, "differing": differing}))


main()

"""Guided decoding: whatever a model of random numbers says, it says in the form that was asked for."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from dynamo.errors import InvalidArgument
from dynamo.reference.core import Core, Emission, Failure, RunningChoice
from dynamo.reference.loading import Options, load_core
from dynamo.reference.request import read_request
from dynamo.reference.threads import Preparation
from support.cases import each_case
from support.random_schemas import random_choices, random_grammar, random_regex, random_schema

ROUNDS = int(os.environ.get("GUIDED_ROUNDS", "0"))  # of 200 constraints each, beside the one below
EOS = 1


class Speaker:
    """A core, and the text of what it generates."""

    def __init__(self, directory: Path, **options: Any) -> None:
        values = {"block_size": 16, "kv_cache_mb": 32, "max_num_seqs": 64, **options}
        self.core: Core = load_core(directory, Options(**values))
        self.preparation = Preparation(directory, self.core.limits)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def add(self, body: dict[str, Any], *, prompt_tokens: int | None = None) -> RunningChoice:
        job = read_request(body, self.core.limits, prompt_tokens=prompt_tokens)
        return self.core.add(self.preparation.prepare(job) if job.needs_steering else job)[0]

    def run(self, choices: Sequence[RunningChoice]) -> list[tuple[list[int], str]]:
        """(tokens shown, finish reason) of each choice. A choice that failed raises."""
        tokens: dict[RunningChoice, list[int]] = {choice: [] for choice in choices}
        reasons: dict[RunningChoice, str] = {}
        while not self.core.is_idle:
            for emission in self.core.step():
                if isinstance(emission, Failure):
                    raise emission.error
                self._note(emission, tokens, reasons)
        assert self.core.pool.held == 0
        return [(tokens[choice], reasons[choice]) for choice in choices]

    def _note(
        self, emission: Emission, tokens: dict[RunningChoice, list[int]], reasons: dict[RunningChoice, str]
    ) -> None:
        if emission.shown:
            tokens[emission.choice].append(emission.drawn.token)
        if emission.reason is not None:
            reasons[emission.choice] = emission.reason

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def say(self, guided: dict[str, Any], **more: Any) -> str:
        """The answer under one constraint; it must have come to an end."""
        tokens, reason = self.run([self.add(request(guided, **more))])[0]
        assert reason == "eos"
        return self.text(tokens)


def request(guided: dict[str, Any] | None, *, seed: int = 0, max_tokens: int = 900, **more: Any) -> dict[str, Any]:
    return {
        "token_ids": [10, 11, 12, seed % 200],
        "eos_token_ids": [EOS],
        "stop_conditions": {"max_tokens": max_tokens, **more.pop("stops", {})},
        "sampling_options": {"temperature": 8.0, "seed": seed, "guided_decoding": guided},
        **more,
    }


@pytest.fixture(scope="module")
def speaker(speaking_model: Path) -> Speaker:
    return Speaker(speaking_model)


def constraints(seed: int) -> list[tuple[dict[str, Any], Any]]:
    """200 of them: (guided_decoding, what to hold the answer against)."""
    rng = random.Random(seed)
    found: list[tuple[dict[str, Any], Any]] = []
    for number in range(200):
        kind = ("json", "json", "regex", "choice", "grammar")[number % 5]
        if kind == "json":
            schema = random_schema(rng)
            found.append(({"json": schema if number % 2 else json.dumps(schema)}, schema))
        elif kind == "regex":
            pattern = random_regex(rng)
            found.append(({"regex": pattern}, pattern))
        elif kind == "choice":
            choices = random_choices(rng)
            found.append(({"choice": choices}, choices))
        else:
            grammar, pattern = random_grammar(rng)
            found.append(({"grammar": grammar}, pattern))
    return found


def check(guided: dict[str, Any], wanted: Any, text: str) -> None:
    if "json" in guided:
        jsonschema.validate(json.loads(text), wanted)
    elif "choice" in guided:
        assert text in wanted
    else:
        assert re.fullmatch(wanted, text), (wanted, text)


@pytest.mark.process  # computes for seconds
def test_every_answer_has_the_form_that_was_asked_for(speaker: Speaker) -> None:
    hold_to_form(speaker, constraints(0))


@pytest.mark.engines
@pytest.mark.skipif(not ROUNDS, reason="make test-engines")
@pytest.mark.timeout(1800)
def test_thousands_of_answers_have_the_form_that_was_asked_for(speaker: Speaker) -> None:
    for seed in range(1, ROUNDS + 1):
        hold_to_form(speaker, constraints(seed))


def hold_to_form(speaker: Speaker, asked: list[tuple[dict[str, Any], Any]]) -> None:
    choices = [speaker.add(request(guided, seed=number)) for number, (guided, _) in enumerate(asked)]
    for (guided, wanted), (tokens, reason) in zip(asked, speaker.run(choices), strict=True):
        assert reason == "eos", guided
        check(guided, wanted, speaker.text(tokens))


@pytest.mark.process  # computes for seconds
def test_an_answer_is_the_same_alone_and_after_giving_way(speaker: Speaker, speaking_model: Path) -> None:
    asked = [guided for guided, _ in constraints(5)]
    alone = [speaker.run([speaker.add(request(guided, seed=n))])[0] for n, guided in enumerate(asked[:100])]
    short = [n for n, (tokens, _) in enumerate(alone) if 20 < len(tokens) < 60]
    small = Speaker(speaking_model)
    small.core = Core(
        small.core.model, blocks=16, block_size=4, context_length=64, max_sequences=16, max_step_tokens=32
    )
    choices = [small.add(request(asked[n], seed=n)) for n in short]
    assert small.run(choices) == [alone[n] for n in short]
    assert sum(choice.sequence.preemptions for choice in choices) > 3


@each_case("number", range(0, 40, 3))
def test_a_moved_request_goes_on_where_it_was(number: int, speaker: Speaker) -> None:
    guided, wanted = constraints(9)[number]
    whole, _ = speaker.run([speaker.add(request(guided, seed=3))])[0]
    for done in {0, len(whole) // 2, len(whole) - 1} - {-1}:
        body = request(guided, seed=3)
        start = len(body["token_ids"])
        body["token_ids"] = [*body["token_ids"], *whole[:done]]
        rest, reason = speaker.run([speaker.add(body, prompt_tokens=start)])[0]
        assert (whole[:done] + rest, reason) == (whole, "eos")
    check(guided, wanted, speaker.text(whole))


def test_tokens_that_the_grammar_cannot_have_produced_are_refused(speaker: Speaker) -> None:
    body = request({"regex": "[0-9]+"})
    body["token_ids"] = [*body["token_ids"], *speaker.tokenizer.encode("x").ids]
    with pytest.raises(InvalidArgument, match="does not allow what was generated so far"):
        speaker.add(body, prompt_tokens=4)


def test_the_end_is_allowed_only_where_the_grammar_accepts(speaker: Speaker) -> None:
    eager = {"extra_args": {"sampling_options": {"logit_bias": {str(EOS): 100, "2": 100}}}}
    assert speaker.say({"regex": "a{3,9}"}, **eager) == "aaa"
    assert speaker.say({"choice": ["", "never"]}, **eager) == ""
    assert json.loads(speaker.say({"json": {"type": "array", "minItems": 2}}, **eager)) is not None


def test_a_grammar_that_is_complete_ends_the_answer_whatever_else_was_asked(speaker: Speaker) -> None:
    assert speaker.say({"regex": "abc"}, stops={"ignore_eos": True}) == "abc"
    assert speaker.say({"regex": "abc"}, stops={"min_tokens": 50}) == "abc"


def test_an_answer_that_is_complete_at_its_last_token_was_not_cut(speaker: Speaker) -> None:
    tokens, _ = speaker.run([speaker.add(request({"regex": "[0-9]{7}"}))])[0]
    for room, reason in ((len(tokens), "eos"), (len(tokens) - 1, "length")):
        body = request({"regex": "[0-9]{7}"}, max_tokens=room)
        assert speaker.run([speaker.add(body)])[0] == (tokens[:room], reason)


def test_min_tokens_keeps_an_open_grammar_going(speaker: Speaker) -> None:
    tokens, _ = speaker.run([speaker.add(request({"regex": "[ab]{1,60}"}, stops={"min_tokens": 30}))])[0]
    assert 30 <= len(tokens) <= 60


def test_a_grammar_cut_by_the_limit_says_so(speaker: Speaker) -> None:
    tokens, reason = speaker.run([speaker.add(request({"regex": "[xyz]{40}"}, max_tokens=9))])[0]
    assert (re.fullmatch("[xyz]{9,40}", speaker.text(tokens)) is not None, reason) == (True, "length")


def test_each_choice_follows_a_grammar_of_its_own(speaker: Speaker) -> None:
    body = request({"regex": "[a-z]{12}"})
    body["sampling_options"]["n"] = 4
    job = read_request(body, speaker.core.limits)
    texts = {speaker.text(tokens) for tokens, _ in speaker.run(speaker.core.add(speaker.preparation.prepare(job)))}
    assert len(texts) == 4
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)


def test_white_space_is_what_the_request_says(speaker: Speaker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    for seed in range(8):
        text = speaker.say({"json": {**schema, "additionalProperties": False}, "whitespace_pattern": " ?"}, seed=seed)
        assert re.fullmatch(r'\{ ?"a" ?: ?\d ?\}', text)


TAGS = [
    {
        "type": "tag",
        "begin": f"{begin}{name}>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}},
        "end": "</fn>",
    }
    for begin, name in (("<fn=", "one"), ("<fn=", "two"))
]
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
STRUCTURES = [
    (
        {"structures": [{"begin": "<fn=a>", "schema": INTEGER, "end": "</fn>"}], "triggers": ["<fn="]},
        r"((?!<fn=).|\n)*(<fn=a>\d+</fn>((?!<fn=).|\n)*)*",
    ),
    (
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<fn="],
                "tags": TAGS,
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        r"((?!<fn=).|\n)*<fn=(one|two)>\d+</fn>",
    ),
    (
        {"format": {"type": "tags_with_separator", "tags": TAGS, "separator": ";", "at_least_one": True}},
        r"<fn=(one|two)>\d+</fn>(;<fn=(one|two)>\d+</fn>)*",
    ),
    (
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "a/b "},
                    {
                        "type": "or",
                        "elements": [{"type": "regex", "pattern": "x/y{2}"}, {"type": "const_string", "value": "z"}],
                    },
                    {"type": "grammar", "grammar": 'start: "p" | "q" start'},
                ],
            }
        },
        r"a/b (x/yy|z)q*p",
    ),
    (
        {
            "format": {
                "type": "tag",
                "begin": "<b>",
                "content": {"type": "regex", "pattern": "[a-z]{0,9}"},
                "end": ["</b>", "</B>"],
            }
        },
        r"<b>[a-z]{0,9}</[bB]>",
    ),
    (
        {
            "format": {
                "type": "tag",
                "begin": "<tool_call>\n",
                "content": {"type": "json_schema", "json_schema": INTEGER},
                "end": "\n</tool_call>",
            }
        },
        r"<tool_call>\n\d+\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("tag", "pattern"), STRUCTURES, ids=range(len(STRUCTURES)))
@pytest.mark.process  # computes for seconds
def test_a_structural_tag_shapes_the_answer(tag: dict[str, Any], pattern: str, speaker: Speaker) -> None:
    likely = {EOS: 20, **dict.fromkeys(speaker.tokenizer.encode("<fn=").ids, 70)}
    ends = {"extra_args": {"sampling_options": {"logit_bias": {str(token): bias for token, bias in likely.items()}}}}
    choices = [speaker.add(request({"structural_tag": tag}, seed=seed, max_tokens=900, **ends)) for seed in range(6)]
    whole = [speaker.text(tokens) for tokens, reason in speaker.run(choices) if reason == "eos"]
    assert len(whole) > 2
    for text in whole:
        assert re.fullmatch(pattern, text), text


def test_a_trigger_must_lead_into_one_of_its_tags(speaker: Speaker) -> None:
    special = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "begin": "<tool_call>\n",
                "content": {"type": "json_schema", "json_schema": INTEGER},
                "end": "\n</tool_call>",
            }
        ],
    }
    call = speaker.tokenizer.token_to_id("<tool_call>")
    likes = {"extra_args": {"sampling_options": {"logit_bias": {str(call): 30, str(EOS): 30}}}}
    seen = 0
    for seed in range(12):
        text = speaker.say({"structural_tag": {"format": special}}, seed=seed, **likes)
        calls = re.findall(r"<tool_call>\n\d+\n</tool_call>", text)
        assert len(calls) == text.count("<tool_call>") == text.count("</tool_call>")
        seen += len(calls)
    assert seen > 3


def thought(text: str) -> tuple[str, str]:
    thoughts, _, answer = text.rpartition("</think>")
    return thoughts, answer


def test_thoughts_are_free_and_the_grammar_holds_for_what_follows(speaker: Speaker) -> None:
    begin, end = (speaker.tokenizer.token_to_id(name) for name in ("<think>", "</think>"))
    eager: dict[str, Any] = {"extra_args": {"sampling_options": {"logit_bias": {str(end): 20}}}}
    for seed in range(6):
        body = request({"regex": "[0-9]{3}"}, seed=seed, require_reasoning=True, **eager)
        body["token_ids"].append(begin)  # the template began them
        tokens, reason = speaker.run([speaker.add(body)])[0]
        assert reason == "eos"
        assert re.fullmatch("[0-9]{3}", thought(speaker.text(tokens))[1])
        assert len(tokens) > 4
    likes = {"extra_args": {"sampling_options": {"logit_bias": {str(begin): 100, str(end): 90}}}}
    text = speaker.say({"regex": "[0-9]{3}"}, require_reasoning=True, **likes)
    assert re.fullmatch("<think>(<think>)*</think>[0-9]{3}", text)


def test_without_thoughts_the_grammar_holds_at_once(speaker: Speaker) -> None:
    assert re.fullmatch("[0-9]{3}", speaker.say({"regex": "[0-9]{3}"}))
    ended = {"extra_args": {"reasoning_ended": True}, "require_reasoning": True}
    assert re.fullmatch("[0-9]{3}", speaker.say({"regex": "[0-9]{3}"}, **ended))


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_the_thoughts(budget: int, speaker: Speaker) -> None:
    begin, end = (speaker.tokenizer.token_to_id(name) for name in ("<think>", "</think>"))
    never: dict[str, Any] = {"extra_args": {"sampling_options": {"logit_bias": {str(end): -100, str(EOS): -100}}}}
    body = request(None, stops={"max_thinking_tokens": budget}, max_tokens=30, **never)
    body["token_ids"].append(begin)
    ((whole, _),) = speaker.run([speaker.add(body)])
    assert end is not None
    assert whole.index(end) == budget
    start = len(body["token_ids"])
    moved = {**body, "token_ids": [*body["token_ids"], *whole[:4]]}
    moved["stop_conditions"] = {**body["stop_conditions"], "max_tokens": 26}
    ((rest, _),) = speaker.run([speaker.add(moved, prompt_tokens=start)])
    assert whole[:4] + rest == whole


BAD = [
    ({"json": {"type": "objec"}}, "guided_decoding.json cannot be compiled: .*objec"),
    ({"json": "{"}, "guided_decoding.json is not JSON"),
    ({"json": 5}, "guided_decoding.json must be an object"),
    ({"json": {}, "regex": "a"}, "must have one of .* got json and regex"),
    ({"regex": "a("}, "guided_decoding.regex cannot be compiled"),
    ({"grammar": "root ::= nowhere"}, "guided_decoding.grammar cannot be compiled"),
    ({"grammar": "(" * 501}, "guided_decoding.grammar nests more than 500"),
    ({"choice": [1]}, "guided_decoding.choice must be a list of strings"),
    ({"choice": "yes"}, "guided_decoding.choice must be a list of strings"),
    ({"whitespace_pattern": " "}, "guided_decoding.whitespace_pattern must be a regex beside json"),
    ({"json": {}, "whitespace_pattern": "("}, "guided_decoding.json cannot be compiled"),
    ({"regex": "a" * 1_000_001}, "guided_decoding.regex has 1000001 characters"),
    ({"structural_tag": {}}, "guided_decoding.structural_tag .*neither"),
    ({"structural_tag": {"format": {"type": "poem"}}}, "format.type 'poem' is not supported"),
    ({"structural_tag": {"format": {"type": "const_string"}}}, "format.value must be a string"),
    (
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}},
        "no tag begins with one of the triggers",
    ),
]


@each_case(("guided", "said"), BAD, ids=[said for _, said in BAD])
def test_what_cannot_be_compiled_is_refused_by_its_name(guided: dict[str, Any], said: str, speaker: Speaker) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        speaker.add(request(guided))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_model_without_a_tokenizer_says_what_is_missing(models: dict[str, Path]) -> None:
    preparation = Preparation(models["llama"], load_core(models["llama"], Options()).limits)
    limits = load_core(models["llama"], Options()).limits
    for body, said in (
        (request({"regex": "a"}), "guided_decoding needs tokenizer.json"),
        (request(None, stops={"max_thinking_tokens": 3}), "needs tokenizer.json"),
    ):
        body["token_ids"] = [5]
        with pytest.raises(InvalidArgument, match=said):
            preparation.prepare(read_request(body, limits))


def test_a_grammar_is_compiled_once_and_not_kept_for_ever(
    speaking_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = Speaker(speaking_model)
    guides = speaker.preparation._guides
    for number in range(70):
        speaker.add(request({"regex": f"a{{{number + 1}}}"}))
    assert len(guides._compiled) == 64
    monkeypatch.setattr(type(guides), "_compile", lambda *_: pytest.fail("compiled again"))
    speaker.add(request({"regex": "a{70}"}))

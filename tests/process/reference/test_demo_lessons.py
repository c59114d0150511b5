"""The text that the demonstration model learns from: every answer follows from its question, and some are held back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import jsonschema
import pytest
from demo_model.batches import load_template
from demo_model.conversations import KINDS, Conversation, conversation, example
from demo_model.lessons import letters, numbers
from demo_model.lessons.others import SELF_DESCRIPTION, anything_else
from demo_model.lessons.question import Question, is_held_out
from demo_model.lessons.reading import UNSAID, looked_up

from dynamo.text.formats.reasoning import REASONING_FORMATS
from dynamo.text.formats.tagged_answer import tagged_machine
from dynamo.text.formats.tools import TOOL_FORMATS
from dynamo.text.output import joined
from support.demo_model import FILES

SAMPLES = 300
INTEGER = re.compile(r"-?\d+")


def questions(lesson: Callable[[Random], Question]) -> list[Question]:
    rng = Random(7)
    return [lesson(rng) for _ in range(SAMPLES)]


def integers(text: str) -> list[int]:
    return [int(digits) for digits in INTEGER.findall(text)]


def quantities(text: str) -> list[int]:
    """The numbers of a sum, whose signs are operators."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


# -- what a calculator or a dictionary would say -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lesson", "calculate"),
    [
        (numbers.added, lambda a, b: a + b),
        (numbers.subtracted, lambda a, b: a - b),
        (numbers.multiplied, lambda a, b: a * b),
    ],
)
def test_arithmetic_is_right(lesson: Callable[[Random], Question], calculate: Callable[[int, int], int]) -> None:
    for question in questions(lesson):
        a, b = quantities(question.text)
        possible = {calculate(a, b), calculate(b, a)}  # "subtract 3 from 5" names them the other way round
        assert int(question.answer) in possible
        assert question.value == int(question.answer)


def test_the_steps_of_an_addition_hold() -> None:
    for question in questions(numbers.added):
        steps = re.findall(r"([\d +]+) = (\d+)", question.thought)
        assert steps
        assert all(sum(quantities(left)) == int(right) for left, right in steps)
        assert question.thought.endswith(f"; so {question.answer}")


def test_counting_goes_in_even_steps_from_the_one_to_the_other() -> None:
    for question in questions(numbers.counted):
        listed = integers(question.answer)
        asked = quantities(question.text)
        assert {listed[0], listed[-1]} == ({*asked} if len(asked) == 2 else {1, *asked})
        assert len({after - before for before, after in pairwise(listed)}) == 1


def test_items_are_as_many_as_are_listed() -> None:
    for question in questions(numbers.items_counted):
        listed = question.key.removeprefix("items ")
        assert listed in question.text
        assert int(question.answer) == len(listed.split(", "))


def test_comparisons_hold() -> None:
    for question in questions(numbers.compared):
        shown = quantities(question.text)
        verb, what, a, b = question.key.split()
        assert sorted(shown) == sorted((int(a), int(b)))
        if verb == "which":
            assert int(question.answer) == (max(shown) if what == "True" else min(shown))
        else:
            holds = {"greater": shown[0] > shown[1], "less": shown[0] < shown[1], "equal": shown[0] == shown[1]}[what]
            assert question.answer == ("Yes" if holds else "No")


def test_orders_hold() -> None:
    for question in questions(numbers.ordered):
        shown = sorted(quantities(question.text))
        wanted = {"max": [shown[-1]], "min": [shown[0]], "sort": shown}[question.key.split()[0]]
        assert integers(question.answer) == wanted


def test_words_are_spelled_turned_round_and_measured() -> None:
    for question in questions(letters.spelled):
        word = question.key.split()[1]
        assert word in question.text
        assert question.answer.replace("-", "") == word
    for question in questions(letters.reversed_word):
        assert question.key.split()[1] in question.text
        assert question.answer == question.key.split()[1][::-1]
    for question in questions(letters.letters_counted):
        *what, word = question.key.split()
        assert word in question.text
        assert int(question.answer) == (len(word) if what == ["letters"] else word.count(what[1]))


def test_a_letter_is_numbered_where_it_occurs() -> None:
    counts = set()
    for question in questions(letters.letter_found):
        _, letter, word = question.key.split()
        marked, count = question.answer.split(": ")
        assert word in question.text
        assert re.sub(r"[-\d]", "", marked) == word
        assert re.findall(r"\w\d", marked) == [f"{letter}{n}" for n in range(1, word.count(letter) + 1)]
        assert (int(count), question.value, question.brief) == (word.count(letter), word.count(letter), count)
        assert question.thought == marked
        counts.add(count)
    assert {"0", "1", "2"} <= counts


def test_a_fact_that_is_looked_up_stands_in_the_text() -> None:
    unsaid = 0
    for question in questions(looked_up):
        unsaid += question.answer == UNSAID
        if question.answer == UNSAID:
            subject = question.thought.removeprefix("the text says nothing of ")
            assert question.text.count(subject) == 1
        else:
            assert question.thought.removeprefix("the text says: ") in question.text
            assert question.answer in question.thought
    assert 0 < unsaid < SAMPLES / 4


def test_anything_else_is_answered_with_what_the_model_is() -> None:
    asked = questions(anything_else)
    assert {question.answer for question in asked} == {SELF_DESCRIPTION}
    assert len({question.text for question in asked}) > SAMPLES / 2


# -- conversations -------------------------------------------------------------------------------------------------------


def conversations(kind: str, *, held_out: bool = False) -> list[Conversation]:
    rng = Random(11)
    return [conversation(rng, kind=kind, held_out=held_out) for _ in range(SAMPLES)]


def test_the_same_seed_and_number_make_the_same_conversation_in_any_order() -> None:
    there = [example(1, number) for number in range(50)]
    back = [example(1, number) for number in reversed(range(50))]
    assert there == back[::-1]
    assert example(2, 0) != there[0]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_examined_is_trained_on(kind: str) -> None:
    trained = {key for each in conversations(kind) for key in each.keys}
    examined = {key for each in conversations(kind, held_out=True) for key in each.keys}
    assert trained
    assert examined
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, examined))


def test_training_conversations_hold_no_question_of_the_examination() -> None:
    assert not [key for number in range(1000) for key in example(1, number).keys if is_held_out(key)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_conversation_is_rendered_and_ends_with_an_answer_to_learn(kind: str) -> None:
    template = load_template(FILES)
    for each in conversations(kind)[:50]:
        assert [message["role"] for message in each.messages[-2:]] in (["user", "assistant"], ["tool", "assistant"])
        assert each.answers[-1].at == len(each.messages) - 1
        whole = template.render(each.messages, add_generation_prompt=False, variables=each.variables)
        for answer in each.answers:
            prompt = template.render(each.messages[: answer.at], variables=each.variables)
            assert whole.startswith(f"{prompt}{answer.text}<|im_end|>\n")


def test_an_answer_as_json_is_what_the_schema_allows() -> None:
    for each in conversations("JSON"):
        value = json.loads(each.answers[0].text)
        if each.variables.get("response_format", {}).get("type") == "json_schema":
            jsonschema.validate(value, each.variables["response_format"]["json_schema"]["schema"])
        for low, high in each.answers[0].given:
            assert each.answers[0].text[low:high].endswith('":')


def test_a_tool_call_is_read_back_by_the_parsers_and_fits_the_tool() -> None:
    for each in conversations("tool call"):
        answer = each.answers[-1]
        if answer.form != "call":
            continue
        calls = said(answer.text).calls
        assert [call.is_complete for call in calls] == [True]
        tools: dict[str, Any] = {tool["function"]["name"]: tool["function"] for tool in each.variables["tools"]}
        jsonschema.validate(json.loads(calls[0].arguments), tools[calls[0].name]["parameters"])
        assert set(tools[calls[0].name]["parameters"].get("required", ())) <= set(json.loads(calls[0].arguments))


def test_thoughts_are_reasoning_and_the_rest_is_the_answer() -> None:
    for each in conversations("thinking"):
        heard = said(each.answers[0].text)
        assert heard.reasoning
        assert f"</think>\n\n{heard.content.strip()}" in each.answers[0].text


def said(text: str) -> Any:
    reader = tagged_machine(TOOL_FORMATS["hermes"].call_form, tags=REASONING_FORMATS["qwen3"].tags())
    return joined([*reader.push(text), *reader.finish()])

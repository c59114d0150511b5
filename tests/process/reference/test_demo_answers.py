"""Questions that were held back from training, answered by the model as it is shipped, through the NumPy engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from demo_model.examine import EXAMINED, answers_of, examine, is_right, main, questions
from demo_model.lessons.others import SELF_DESCRIPTION

from dynamo.reference import demo

ASKED: Final = (
    ("what is the sum of 19 and 36?", "55"),
    ("Hello, 4*0", "0"),
    ("Tell me 41 - 14.", "27"),
    ("What is 10 minus 91?", "-81"),
    ("Sum: 38, 87", "125"),
    ("Add 35 and 46", "81"),
    ("Calculate 11 + 0.", "11"),
    ("Count down by fives from 45 to 25.", "45, 40, 35, 30, 25"),
    ('How many letters are in "drumshaip"?', "9"),
    ("How many things are these: cup, camera, cup, cup, hat, bag, hat?", "7"),
    ("Quick question: Count from 7 to 97 by tens.", "7, 17, 27, 37, 47, 57, 67, 77, 87, 97"),
    ("Count down from 31 to 20", "31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20"),
    ("Can you spell bowl?", "b-o-w-l"),
    ('Spell "owl" for me.', "o-w-l"),
    ("Spell out 'sao'", "s-a-o"),
    ('Hi! Please reverse "gert".', "treg"),
    ("Say dock in reverse.", "kcod"),
    ('Turn "robot" round.', "tobor"),
    ("which is the biggest of 21, 46, 18, 76, 36", "76"),
    ("Is 95 less than 59?", "No"),
    ("Find the minimum of 38, 22, 78.", "22"),
    ("Smallest number: 63, 27, 41", "27"),
    ("Which of these is the smallest: 19, 84, 11?", "11"),
    ("Answer from the text.\nLena likes bread.\nWhat food does Lena like?", "bread"),
    ("Ida's favourite colour is white. Mark lives in Lmjzkg.\nWhat is Ida's favourite colour?", "white"),
    (
        "Here is a text: \"Drikses works as a driver. Hugo's favourite colour is brown. Nina was born in Hamburg. Nina's favourite colour is purple. Vdy works as a nurse. Jane's favourite colour is yellow.\" Which colour does Jane like best?",
        "yellow",
    ),
    (
        "Answer from the text.\nThe hat belongs to Oscar. The camera belongs to Tom. The bag belongs to Lisa. The clock belongs to Llxtxa. The map belongs to Toortbexp. The coat belongs to Olga. The umbrella belongs to Werox. The pen belongs to Jane.\nWhose camera is it?",
        "Tom",
    ),
    ("What's up?", SELF_DESCRIPTION),
    ("Summarize the news.", SELF_DESCRIPTION),
    ("how do you say ptcpqpce kistcrash in Spanish?", SELF_DESCRIPTION),
    ("What do you think about the trimgous?", SELF_DESCRIPTION),
)
LEAST: Final = 6
"""Of eight of the examination's questions, each kind; one or two may turn out otherwise on another machine."""
WEAK: Final = {  # kinds that the page's table has below 95 %; what is asked of them is what they had there, less a few
    "picture: colour of one of two": 1,
    "picture: nothing known": 4,
    "text beside a picture": 5,
}
SIMPLE: Final = (
    "picture: how many dots",
    "picture: colour of dots",
    "picture: colour of a shape",
    "picture: which digit",
    "picture: which of two shapes",
)
LEAST_OF_TWENTY: Final = 19  # 95 %


def test_plain_questions_are_answered() -> None:
    got = answers_of(demo.DIRECTORY, [([{"role": "user", "content": text}], {}) for text, _ in ASKED])
    assert dict(zip([text for text, _ in ASKED], got, strict=True)) == dict(ASKED)


@pytest.mark.parametrize("kind", EXAMINED)
def test_every_kind_of_conversation_goes_on_as_it_should(kind: str) -> None:
    (result,) = examine(demo.DIRECTORY, count=8, kinds=[kind])
    assert result.right >= WEAK.get(kind, LEAST), result.wrong


def test_simple_questions_about_pictures_are_answered() -> None:
    found = examine(demo.DIRECTORY, count=20, kinds=SIMPLE)
    assert [result.kind for result in found] == list(SIMPLE)
    assert not {result.kind: result.wrong for result in found if result.right < LEAST_OF_TWENTY}


def test_the_examination_counts_and_shows_what_is_wrong() -> None:
    (result,) = examine(demo.DIRECTORY, count=5, kinds=["anything else"])
    assert (result.kind, result.asked, result.right + len(result.wrong)) == ("anything else", 5, 5)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("arithmetic", "0.5"), ("JSON", "{"), ("tool call", "<tool_call>\n{}\n</tool_call>"), ("thinking", "<think>\n42")],
)
def test_only_a_right_answer_is_right(kind: str, wrong: str) -> None:
    for _, answer in questions(kind, 20):
        assert is_right(answer, answer.text)
        assert not is_right(answer, wrong)


def test_the_table_of_the_docs_is_replaced_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("demo_model.examine.EXAMINED", ("spelling",))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- examined -->\nold\n<!-- end -->\nafter\n")
    main(["--count", "2", "--into", str(page)])
    text = page.read_text()
    assert text.startswith("before\n<!-- examined -->\n| Kind of question | Right | Answers |\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| spelling | " in text
    assert "old" not in text
    assert "| spelling | " in capsys.readouterr().out

"""The drawings that a model learns to see from: what is said of them is what is in them, and some are held back."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from demo_model.conversations.picture_chats import PICTURE_KINDS, picture_key, practised
from demo_model.lessons.pictures import ABOUT, MANY, UNKNOWN, VARIANTS, Picture, asked_about, picture
from demo_model.lessons.question import is_held_out

from dynamo.reference.demo.draw import COLOURS, SHAPES, encode_png, main, render
from dynamo.reference.picture_files import read_png
from support.cases import each_case

SAMPLES = 60


def pictures(kind: str | None = None) -> list[Picture]:
    rng = Random(4)
    return [picture(rng, kind) for _ in range(SAMPLES)]


def spots(pixels: np.ndarray) -> int:
    """How many connected fields differ from the corner's colour."""
    open_ = {tuple(at) for at in np.argwhere(np.abs(pixels.astype(int) - pixels[0, 0]).sum(axis=2) > 90)}
    found = 0
    while open_:
        found, edge = found + 1, [open_.pop()]
        while edge:
            row, column = edge.pop()
            near = {(row + down, column + across) for down in (-1, 0, 1) for across in (-1, 0, 1)} & open_
            open_ -= near
            edge += near
    return found


def test_there_are_as_many_dots_as_are_said() -> None:
    for shown in pictures("dots"):
        if max(shown.drawing.width, shown.drawing.height) < 120:
            assert min(spots(render(shown.drawing)), MANY) == shown.dots


def test_shapes_and_digits_are_one_mark_each_and_a_blank_is_none() -> None:
    for shown in pictures("shapes"):
        assert spots(render(shown.drawing)) == len(shown.shapes) == len(dict(shown.shapes))
    for shown in pictures("blank"):
        assert (spots(render(shown.drawing)), shown.described) == (0, "nothing")
    assert {shown.digit for shown in pictures("digit")} == set(range(10))


def test_a_colour_is_the_one_that_is_said() -> None:
    for shown in pictures("digit"):
        (mark,) = shown.drawing.marks
        nearest = min(
            VARIANTS, key=lambda name: min(np.abs(np.subtract(each, mark.colour)).max() for each in VARIANTS[name])
        )
        assert nearest == shown.colour


def test_the_same_numbers_make_the_same_picture() -> None:
    for one, two in zip(pictures(), pictures(), strict=True):
        assert one.key == two.key
        assert (one.pixels() == two.pixels()).all()


@pytest.mark.parametrize("about", ABOUT)
def test_an_answer_follows_from_the_picture(about: str) -> None:
    rng = Random(6)
    for shown in pictures():
        question = asked_about(rng, shown, about)
        assert question.key == picture_key(shown)
        if shown.kind == "other":
            assert question.answer == UNKNOWN
        elif about == "digit" and shown.digit is not None:
            assert question.answer == str(shown.digit)
        elif about == "count" and 0 < shown.dots < MANY:
            assert question.answer == str(shown.dots)
        elif about == "describe":
            assert question.answer == shown.described
        elif about == "either" and len(shown.shapes) == 1:
            assert question.answer in (shown.shapes[0][0], "neither")


@pytest.mark.parametrize("kind", PICTURE_KINDS)
def test_what_is_examined_is_about_pictures_that_were_held_back(kind: str) -> None:
    rng = Random(8)
    for _ in range(5):
        made = PICTURE_KINDS[kind](rng, True)
        assert len(made.pictures) == 1
        assert all(map(is_held_out, made.keys))
        parts = next(message for message in made.messages if message["role"] == "user")["content"]
        assert sorted(part["type"] for part in parts) == ["image", "text"]


def test_chats_to_learn_from_are_made_of_the_picture_they_are_given() -> None:
    rng = Random(9)
    for shown in pictures():
        made = practised(rng, shown)
        assert made.pictures == (shown,)
        assert [made.messages[answer.at]["role"] for answer in made.answers] == ["assistant"] * len(made.answers)


# -- the command ---------------------------------------------------------------------------------------------------------


@each_case(("flags", "count"), [(["--dots", "3"], 3), (["--dots", "9", "--side", "300"], 9), (["--shape", "square"], 1), (["--digit", "7"], 1)])  # fmt: skip
def test_the_command_writes_a_picture(tmp_path: Path, flags: list[str], count: int) -> None:
    path = tmp_path / "picture.png"
    main([*flags, "--colour", "blue", str(path)])
    pixels = read_png(path.read_bytes())
    assert spots(pixels) == count
    assert {tuple(each) for each in pixels.reshape(-1, 3)} >= {COLOURS["blue"], COLOURS["white"]}


@each_case("flags", [["--dots", "0"], ["--dots", "3", "--digit", "2"], ["--shape", "star"], ["--dots", "2", "--side", "1"], []])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*flags, str(tmp_path / "picture.png")])
    assert ended.value.code == 2
    assert "--" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_shape_and_colour_survives_the_png() -> None:
    rng = Random(2)
    for shown in [picture(rng, "shapes") for _ in range(20)]:
        pixels = shown.pixels()
        assert (read_png(encode_png(pixels)) == pixels).all()
        assert {shape for shape, _ in shown.shapes} <= set(SHAPES)

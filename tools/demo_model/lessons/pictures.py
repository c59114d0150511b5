"""Pictures and what is asked of them: how many dots, which colour, which digit, which shape, or all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from demo_model.lessons.question import Question, phrase
from dynamo.reference.demo.draw import COLOURS, DIGITS, SHAPES, Colour, Drawing, Mark, render

__all__ = ["ABOUT", "MANY", "UNKNOWN", "Picture", "asked_about", "picture"]

Pixels = npt.NDArray[np.uint8]

MANY: Final = 10  # dots: so many or more are not counted
UNKNOWN: Final = "I cannot tell. I only know dots, digits, circles, squares and triangles."
VARIANTS: Final[dict[str, tuple[Colour, ...]]] = {  # what people mean by a name
    "red": (COLOURS["red"], (255, 0, 0), (190, 20, 30), (235, 55, 45)),
    "green": (COLOURS["green"], (0, 128, 0), (0, 230, 20), (50, 195, 80), (10, 100, 20)),
    "blue": (COLOURS["blue"], (0, 0, 255), (30, 100, 200), (20, 30, 140), (70, 130, 240)),
    "yellow": (COLOURS["yellow"], (255, 255, 0), (250, 230, 80)),
    "orange": (COLOURS["orange"], (255, 165, 0), (255, 120, 0)),
    "purple": (COLOURS["purple"], (128, 0, 128), (150, 80, 210), (100, 20, 140)),
    "black": (COLOURS["black"], (0, 0, 0), (40, 40, 40)),
    "white": (COLOURS["white"], (255, 255, 255)),
}
CONTRAST: Final = 100.0  # between a mark and what is under it, at least
NOISE: Final = 6.0  # of a picture that was compressed; levels of 255

_LIGHT: Final[tuple[Colour, ...]] = (
    (245, 245, 245), (255, 250, 235), (235, 245, 255), (230, 230, 230), (250, 240, 245), (210, 230, 215), (250, 245, 200), (190, 215, 245),
)  # fmt: skip
_DARK: Final[tuple[Colour, ...]] = ((0, 0, 0), (25, 25, 30), (20, 25, 60), (45, 45, 45), (60, 30, 30), (20, 55, 35))
_MIDDLE: Final[tuple[Colour, ...]] = ((128, 128, 128), (170, 170, 170), (120, 140, 170), (170, 140, 110))


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture, and everything that is true of it."""

    key: str  # its parameters: the split is made by it
    kind: str  # blank, dots, shapes, digit, or other: nothing that is known
    drawing: Drawing
    dots: int = 0  # MANY: so many or more
    colour: str | None = None  # of the dots or of the digit; None: they have several
    shapes: tuple[tuple[str, str], ...] = ()  # (shape, colour), the most to the left first
    digit: int | None = None
    texture: Callable[[np.random.Generator, int, int], npt.NDArray[np.float32]] | None = field(default=None, repr=False)
    seed: int = 0  # of noise and texture
    noise: float = 0.0

    def pixels(self) -> Pixels:
        """Return the picture as it would be read from a file."""
        generator = np.random.default_rng(self.seed)
        found = render(self.drawing)
        if self.texture is not None:
            found = (
                np.rint(self.texture(generator, self.drawing.width, self.drawing.height)).clip(0, 255).astype(np.uint8)
            )
        if self.noise:
            grain = generator.standard_normal(found.shape, np.float32) * np.float32(self.noise)
            found = (found + grain).clip(0, 255).astype(np.uint8)
        return found

    @property
    def described(self) -> str:
        """The picture in words."""
        match self.kind:
            case "blank":
                return "nothing"
            case "dots":
                many = "more than 9" if self.dots == MANY else str(self.dots)
                return f"{many} {self.colour + ' ' if self.colour else ''}dot{'s' if self.dots > 1 else ''}"
            case "shapes":
                return " and ".join(f"{_article(colour)} {colour} {shape}" for shape, colour in self.shapes)
            case "digit":
                return f"the digit {self.digit} in {self.colour}"
        return UNKNOWN


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


# -- drawing -------------------------------------------------------------------------------------------------------------


def picture(rng: Random, kind: str | None = None) -> Picture:
    """Return a random picture."""
    kind = kind or rng.choices(("dots", "shapes", "digit", "blank", "other"), (40, 26, 24, 2, 8))[0]
    width, height = _size(rng)
    if kind == "other":
        texture, seed = rng.choice(_TEXTURES), rng.getrandbits(32)
        drawing = Drawing(width, height, (255, 255, 255), ())
        return Picture(f"{texture.__name__} {width} {height} {seed}", kind, drawing, texture=texture, seed=seed)
    ground = _ground(rng)
    found = {"blank": _blank, "dots": _dots, "shapes": _shapes, "digit": _digit}[kind](rng, width, height, ground)
    seed = rng.getrandbits(32)
    return Picture(**found, key=repr(found["drawing"]), kind=kind, seed=seed, noise=rng.choice((0, 0, 0, 0, 2, NOISE)))


def _size(rng: Random) -> tuple[int, int]:
    side = rng.randint(48, 110) if rng.random() < 0.95 else rng.randint(110, 360)
    if rng.random() < 0.65:
        return side, side
    other = max(round(side / rng.uniform(1.0, 1.8)), 32)
    return (side, other) if rng.random() < 0.6 else (other, side)


def _ground(rng: Random) -> Colour:
    roll = rng.random()
    if roll < 0.55:
        return (255, 255, 255)
    return rng.choice(_LIGHT if roll < 0.75 else _DARK if roll < 0.92 else _MIDDLE)


def _colour(rng: Random, ground: Colour, *others: str) -> tuple[str, Colour]:
    """Return a colour that is seen on this ground, and none of the others: its name and its value."""
    while True:
        name = rng.choice(list(VARIANTS))
        red, green, blue = (min(max(value + rng.randint(-14, 14), 0), 255) for value in rng.choice(VARIANTS[name]))
        if name not in others and math.dist((red, green, blue), ground) >= CONTRAST:
            return name, (red, green, blue)


def _blank(rng: Random, width: int, height: int, ground: Colour) -> dict[str, Any]:
    ground = (ground[0], ground[1], min(ground[2], 255 - rng.randint(0, 3)))
    return {"drawing": Drawing(width, height, ground, ())}


def _dots(rng: Random, width: int, height: int, ground: Colour) -> dict[str, Any]:
    count = rng.randint(1, 9) if rng.random() < 0.96 else rng.randint(MANY + 1, 16)
    name, colour = _colour(rng, ground)
    is_mixed = count > 1 and rng.random() < 0.2
    side = max(width, height)
    most = min(0.12, 0.42 * math.sqrt(width * height / (count + 1)) / side)
    reach = rng.uniform(0.05, max(most, 0.052)) * side
    is_even = rng.random() < 0.5  # all of one size
    marks: list[Mark] = []
    names: set[str] = set()
    for _ in range(count):
        size = reach if is_even else max(reach * rng.uniform(0.7, 1.0), 0.048 * side)
        place = _place(rng, width, height, size, marks, 0.03 * side)
        if place is None:
            break
        if is_mixed:
            name, colour = _colour(rng, ground)
        names.add(name)
        marks.append(Mark("circle", colour, *place, size))
    if not marks:
        return _dots(rng, width, height, ground)
    drawing = Drawing(width, height, ground, tuple(marks), is_smooth=rng.random() < 0.75)
    return {"drawing": drawing, "dots": min(len(marks), MANY), "colour": names.pop() if len(names) == 1 else None}


def _place(
    rng: Random, width: int, height: int, size: float, marks: Sequence[Mark], gap: float
) -> tuple[float, float] | None:
    """Return where a mark has room; None: nowhere was found."""
    for _ in range(60):
        x, y = rng.uniform(size + 1, width - size - 1), rng.uniform(size + 1, height - size - 1)
        if all(math.dist((x, y), (other.x, other.y)) > size + other.size + gap for other in marks):
            return x, y
    return None


def _shapes(rng: Random, width: int, height: int, ground: Colour) -> dict[str, Any]:
    side, count = min(width, height), 1 if rng.random() < 0.6 else 2
    while True:
        marks: list[Mark] = []
        shapes: list[tuple[float, str, str]] = []
        names: list[str] = []
        for what in rng.sample(SHAPES, count):
            size = rng.uniform(0.17 if count == 1 else 0.15, 0.44 if count == 1 else 0.24) * side
            turn = rng.choice((0.0, 0.0, rng.uniform(-15, 15)))
            reach = size * (1.25 if turn and what != "circle" else 1.0)
            place = _place(rng, width, height, min(reach, side / 2 - 1.5), marks, 0.1 * side)
            if place is None:
                break
            name, colour = _colour(rng, ground, *names)
            names.append(name)
            marks.append(Mark(what, colour, *place, size, turn))
            shapes.append((place[0], what, name))
        if len(marks) == count:
            break
    drawing = Drawing(width, height, ground, tuple(marks), is_smooth=rng.random() < 0.75)
    return {"drawing": drawing, "shapes": tuple((what, name) for _, what, name in sorted(shapes))}


def _digit(rng: Random, width: int, height: int, ground: Colour) -> dict[str, Any]:
    digit, side = rng.randrange(10), min(width, height)
    name, colour = _colour(rng, ground)
    size = rng.uniform(0.2, 0.45) * side
    room = size * 0.8
    mark = Mark(
        str(digit),
        colour,
        rng.uniform(room, width - room),
        rng.uniform(min(size * 1.1, height / 2), max(height - size * 1.1, height / 2)),
        size,
        turn=rng.uniform(-8, 8),
        style=rng.randrange(len(DIGITS[digit])),
        stroke=rng.uniform(0.14, 0.45),
        slant=rng.choice((0.0, 0.0, rng.uniform(-0.1, 0.25))),
    )
    drawing = Drawing(width, height, ground, (mark,), is_smooth=rng.random() < 0.8)
    return {"drawing": drawing, "colour": name, "digit": digit}


# -- what is nothing known -----------------------------------------------------------------------------------------------


def _grain(generator: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    return generator.uniform(0, 255, (height, width, 3)).astype(np.float32)


def _blocks(generator: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    """Draw a few large fields of random colours, as a photograph has."""
    rows, columns = generator.integers(2, 9, 2)
    small = generator.uniform(0, 255, (rows, columns, 3))
    found = small[np.arange(height) * rows // height][:, np.arange(width) * columns // width]
    spread: npt.NDArray[np.float32] = found.astype(np.float32)
    return spread


def _gradient(generator: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    first, across, down = generator.uniform(-60, 315, (3, 3))
    x, y = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
    found: npt.NDArray[np.float32] = (first + (across - first) * x + (down - first) * y).astype(np.float32)
    return found


def _waves(generator: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    """Draw smooth hills of colour, with a grain over them."""
    x, y = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
    total = np.full((height, width, 3), generator.uniform(60, 200))
    for _ in range(6):
        a, b = generator.uniform(-25, 25, 2)
        total = total + generator.uniform(10, 50, 3) * np.sin(a * x + b * y + generator.uniform(0, 6.3, 3))
    found: npt.NDArray[np.float32] = total.astype(np.float32)
    return found + generator.standard_normal(total.shape, np.float32) * np.float32(generator.uniform(0, 20))


def _lines(generator: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    """Draw many lines across the picture."""
    x, y = np.arange(width)[None, :], np.arange(height)[:, None]
    found = np.empty((height, width, 3), np.float32)
    found[:] = generator.choice(np.array([[255, 255, 255], [240, 240, 230], [20, 20, 20]]))
    for _ in range(generator.integers(6, 20)):
        angle, offset = generator.uniform(0, math.pi), generator.uniform(-0.5, 0.5) * max(width, height)
        away = np.abs((x - width / 2) * math.sin(angle) + (y - height / 2) * math.cos(angle) - offset)
        found[away < generator.uniform(0.005, 0.03) * max(width, height)] = generator.uniform(0, 255, 3)
    return found


_TEXTURES: Final = (_grain, _blocks, _gradient, _waves, _lines)


# -- asking --------------------------------------------------------------------------------------------------------------

_THE_PICTURE: Final = ("the picture", "the image", "this picture", "this image", "the drawing")
_COUNT: Final = (
    "How many dots are in {p}?", "How many dots are in {p}?", "How many dots are there?", "How many dots do you see?", "Count the dots.",
    "Count the dots in {p}.", "How many dots does {p} show?", "What is the number of dots in {p}?", "How many dots can you see in {p}?",
    "How many points are in {p}?", "How many circles are in {p}?", "How many {c}dots are in {p}?", "How many {c}dots are there?",
)  # fmt: skip
_DIGIT: Final = (
    "Which digit is this?", "What digit is this?", "Which digit is in {p}?", "What number is this?", "Which number is in {p}?", "Read the digit.",
    "Which digit do you see?", "What does it say?", "Which digit does {p} show?", "What digit is in {p}?", "Read the number in {p}.", "What number is shown?",
)  # fmt: skip
_SHAPE: Final = (
    "What shape is this?", "Which shape is this?", "What shape is in {p}?", "Which shape do you see?", "What is the shape in {p}?", "Which shape does {p} show?",
)  # fmt: skip
_EITHER: Final = (
    "Is this {a} or {b}?", "Is this {a} or {b}?", "Is it {a} or {b}?", "Do you see {a} or {b}?", "Does {p} show {a} or {b}?", "Is there {a} or {b} in {p}?",
    "Which is it, {a} or {b}?",
)  # fmt: skip
_COLOUR: Final = (
    "What colour is the {w}?", "What colour is the {w}?", "What color is the {w}?", "Which colour is the {w}?", "Which colour does the {w} have?",
    "What is the colour of the {w}?", "What color is the {w} in {p}?", "What colour is the {w} in {p}?",
)  # fmt: skip
_COLOURS: Final = ("What colour are the dots?", "What color are the dots?", "Which colour do the dots have?", "What is the colour of the dots in {p}?", "Which colour are the dots?")  # fmt: skip
_DESCRIBE: Final = (
    "What is in {p}?", "What is in {p}?", "What do you see?", "Describe {p}.", "What is this?", "What do you see in {p}?", "Describe what you see.",
    "What does {p} show?", "What is shown here?", "Tell me what is in {p}.", "What can you see?", "Explain {p}.", "What's in {p}?", "Caption {p}.",
)  # fmt: skip
_PRESENT: Final = (
    "Is there {a} in {p}?",
    "Do you see {a}?",
    "Does {p} show {a}?",
    "Can you see {a}?",
    "Is {a} in {p}?",
)
_IS_IT: Final = ("Is the {w} {c}?", "Is the {w} in {p} {c}?", "Is it {a} {c} {w}?", "Is this {a} {c} {w}?")

ABOUT: Final = ("count", "digit", "shape", "either", "colour", "describe", "present", "is it")


def asked_about(rng: Random, shown: Picture, about: str | None = None) -> Question:
    """Return a question about a picture. `about`: which kind, one of `ABOUT`; mostly one that makes sense by default."""
    if about is None:
        likely = {
            "dots": ("count", "count", "count", "colour", "describe"),
            "digit": ("digit", "digit", "digit", "colour", "describe"),
            "shapes": ("either", "shape", "colour", "colour", "describe", "present", "is it"),
        }.get(shown.kind, ABOUT)
        about = rng.choice(likely if rng.random() < 0.88 else ABOUT)
    if about == "is it" and shown.kind != "shapes":
        about = "present"
    text, answer = _ASK[about](rng, shown)
    if shown.kind == "other":
        answer = UNKNOWN
    thought = (
        f"the picture shows {shown.described}" if shown.kind != "other" else "the picture shows nothing that I know"
    )
    return Question("pictures", f"picture {shown.key}", text, answer, thought, answer)


def _said(rng: Random, wordings: Sequence[str], **values: object) -> str:
    return phrase(rng, wordings, p=rng.choice(_THE_PICTURE), **values)


def _count(rng: Random, shown: Picture) -> tuple[str, str]:
    colour = f"{shown.colour} " if shown.kind == "dots" and shown.colour else ""
    text = _said(rng, _COUNT, c=colour)
    circles = sum(shape == "circle" for shape, _ in shown.shapes)
    dots = shown.dots or circles
    if "circles" in text and shown.kind == "shapes":
        return text, str(circles)
    if not dots and shown.kind != "blank":
        return text, "There are no dots in the picture."
    return text, "more than 9" if dots == MANY else str(dots)


def _read(rng: Random, shown: Picture) -> tuple[str, str]:
    return _said(rng, _DIGIT), "There is no digit in the picture." if shown.digit is None else str(shown.digit)


def _shape(rng: Random, shown: Picture) -> tuple[str, str]:
    text = _said(rng, _SHAPE)
    if shown.kind == "shapes":
        return text, " and ".join(shape for shape, _ in shown.shapes)
    return text, "circle" if shown.dots == 1 else "There is no shape in the picture."


def _either(rng: Random, shown: Picture) -> tuple[str, str]:
    present = {shape for shape, _ in shown.shapes} or ({"circle"} if shown.dots == 1 else set())
    one, other = rng.sample(SHAPES, 2)
    if len(present) == 1 and rng.random() < 0.85:
        (one,) = present
        other = rng.choice([shape for shape in SHAPES if shape != one])
        if rng.random() < 0.5:
            one, other = other, one
    text = _said(rng, _EITHER, a=f"a {one}", b=f"a {other}")
    both = [shape for shape in (one, other) if shape in present]
    return text, both[0] if len(both) == 1 else "both" if both else "neither"


def _colour_of(rng: Random, shown: Picture) -> tuple[str, str]:
    if shown.kind == "dots" and (shown.dots > 1 or rng.random() < 0.3):
        if shown.dots == 1:
            return _said(rng, _COLOUR, w="dot"), str(shown.colour)
        return _said(rng, _COLOURS), shown.colour or "different colours"
    if shown.kind == "digit" and rng.random() < 0.9:
        return _said(rng, _COLOUR, w=rng.choice(("digit", "digit", "number"))), str(shown.colour)
    colours = dict(shown.shapes) or ({"circle": str(shown.colour)} if shown.dots == 1 else {})
    which = rng.choice(list(colours)) if colours and rng.random() < 0.9 else rng.choice(SHAPES)
    text = _said(rng, _COLOUR, w="shape" if len(shown.shapes) == 1 and rng.random() < 0.15 else which)
    if "shape" in text:
        return text, shown.shapes[0][1]
    return text, colours.get(which, f"There is no {which} in the picture.")


def _describe(rng: Random, shown: Picture) -> tuple[str, str]:
    return _said(rng, _DESCRIBE), shown.described


def _present(rng: Random, shown: Picture) -> tuple[str, str]:
    what = rng.choice((*SHAPES, *SHAPES, "dot", "digit"))
    if shown.shapes and rng.random() < 0.5:
        what = rng.choice(shown.shapes)[0]
    there = {shape for shape, _ in shown.shapes} | {shown.kind.removesuffix("s")}
    if shown.dots or "circle" in there:  # a dot is a circle, too
        there |= {"circle", "dot"}
    return _said(rng, _PRESENT, a=f"a {what}"), "Yes" if what in there else "No"


def _is_it(rng: Random, shown: Picture) -> tuple[str, str]:
    shape, colour = rng.choice(shown.shapes)
    asked = colour if rng.random() < 0.5 else rng.choice(list(VARIANTS))
    return _said(rng, _IS_IT, w=shape, c=asked, a=_article(asked)), "Yes" if asked == colour else "No"


_ASK: Final[dict[str, Callable[[Random, Picture], tuple[str, str]]]] = {
    "count": _count,
    "digit": _read,
    "shape": _shape,
    "either": _either,
    "colour": _colour_of,
    "describe": _describe,
    "present": _present,
    "is it": _is_it,
}

"""Spelling, turning round and counting letters: what a model can only do that sees letters."""

from __future__ import annotations

from random import Random

from demo_model.lessons.question import Question, phrase
from demo_model.lessons.words import word

__all__ = ["letter_found", "letters_counted", "reversed_word", "spelled"]


def spelled(rng: Random) -> Question:
    shown, bare = _shown(rng)
    text = phrase(
        rng,
        ("Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "How is {w} spelled?", "Please spell {w}.", "Spell out {w}.",
         "Can you spell {w}?", "Write the letters of {w}.", "Spell {w} for me."),
        w=shown,
    )  # fmt: skip
    return Question(
        "spelling",
        f"spell {bare}",
        text,
        "-".join(bare),
        f"the word is {bare}",
        "-".join(bare),
        ("spelling", "letters", "answer"),
    )


def reversed_word(rng: Random) -> Question:
    shown, bare = _shown(rng)
    text = phrase(
        rng,
        ("Reverse {w}.", "Reverse the word {w}.", "Write {w} backwards.", "What is {w} backwards?", "What is {w} reversed?",
         "Turn {w} round.", "Please reverse {w}.", "Spell {w} backwards.", "Can you reverse {w}?", "Say {w} in reverse."),
        w=shown,
    )  # fmt: skip
    backwards = bare[::-1]
    return Question(
        "reversing",
        f"reverse {bare}",
        text,
        backwards,
        f"{'-'.join(bare)}, from the end: {'-'.join(backwards)}",
        backwards,
        ("reversed", "word", "answer"),
    )


def letters_counted(rng: Random) -> Question:
    shown, bare = _shown(rng)
    text = phrase(
        rng,
        ("How many letters are in {w}?", "How many letters does {w} have?", "How long is the word {w}?", "Count the letters in {w}.",
         "How many letters are there in the word {w}?", "What is the length of {w}?"),
        w=shown,
    )  # fmt: skip
    thought = ", ".join(f"{n} {letter}" for n, letter in enumerate(bare, 1))
    names = ("count", "letters", "answer", "length")
    return Question("counting", f"letters {bare}", text, str(len(bare)), thought, len(bare), names)


def letter_found(rng: Random) -> Question:
    """Ask how often one letter occurs: the hardest of the small questions, since every letter counts."""
    shown, bare = _shown(rng)
    letter = rng.choice(bare) if rng.random() < 0.8 else rng.choice("abcdeilnorst")
    count = bare.count(letter)
    text = phrase(
        rng,
        ('How many times is the letter "{x}" in {w}?', 'How many "{x}" are in {w}?', "How many {x}'s are in {w}?",
         'How often does the letter "{x}" occur in {w}?', 'Count the letter "{x}" in {w}.', "How many times does {x} appear in {w}?"),
        w=shown, x=letter,
    )  # fmt: skip
    marked = _marked(bare, letter)
    return Question(
        "one letter",
        f"letter {letter} {bare}",
        text,
        f"{marked}: {count}",
        marked,
        count,
        ("count", "answer"),
        brief=str(count),
    )


def _marked(bare: str, letter: str) -> str:
    """Spell the word and number the letter where it occurs: what a glance at whole words cannot count."""
    seen, written = 0, []
    for each in bare:
        seen += each == letter
        written.append(f"{each}{seen}" if each == letter else each)
    return "-".join(written)


def _shown(rng: Random) -> tuple[str, str]:
    """Return (the word as written in the question, the word): mostly in quotes."""
    bare = word(rng)
    roll = rng.random()
    return (f'"{bare}"' if roll < 0.6 else f"'{bare}'" if roll < 0.75 else bare), bare

"""Finding a fact in the text that was given, and only there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from demo_model.lessons.question import Question
from demo_model.lessons.words import ANIMALS, COLOURS, FOODS, JOBS, THINGS, name, place, pseudo_word

__all__ = ["UNSAID", "described", "looked_up", "looked_up_again"]

UNSAID: Final = "The text does not say."

# (what the text says of someone, how one asks for it, the key as JSON, what to fill in)
_Fact = tuple[str, tuple[str, ...], str, Callable[[Random], str]]
_PEOPLE: Final[tuple[_Fact, ...]] = (
    ("{n} lives in {v}.", ("Where does {n} live?", "In which city does {n} live?", "What city does {n} live in?"), "city", place),
    ("{n} was born in {v}.", ("Where was {n} born?", "In which city was {n} born?"), "city", place),
    ("{n} works as a {v}.", ("What does {n} work as?", "What is {n}'s job?", "What is the job of {n}?"), "job", lambda r: r.choice(JOBS)),
    ("{n} has a {v}.", ("Which animal does {n} have?", "What pet does {n} have?"), "pet", lambda r: r.choice(ANIMALS)),
    ("{n} likes {v}.", ("What does {n} like?", "What food does {n} like?"), "food", lambda r: r.choice(FOODS)),
    ("{n} is {v} years old.", ("How old is {n}?", "What is the age of {n}?", "What is {n}'s age?"), "age", lambda r: str(r.randint(1, 99))),
    ("{n}'s favourite colour is {v}.", ("What is {n}'s favourite colour?", "Which colour does {n} like best?"), "colour", lambda r: r.choice(COLOURS)),
    ("{n} plays in {v}.", ("Where does {n} play?",), "place", place),
    ("{n}'s phone number is {v}.", ("What is {n}'s phone number?", "What is the phone number of {n}?"), "phone", lambda r: str(r.randint(100, 9999))),
)  # fmt: skip
_OBJECTS: Final[tuple[_Fact, ...]] = (
    ("The {n} is in the {v}.", ("Where is the {n}?", "Where can I find the {n}?", "Where do I find the {n}?"), "place", lambda r: r.choice(("kitchen", "garden", "drawer", "hall", "car", "cellar", "office", "box", "bag"))),
    ("The {n} costs {v} dollars.", ("How much does the {n} cost?", "What is the price of the {n}?", "How many dollars does the {n} cost?"), "price", lambda r: str(r.randint(1, 999))),
    ("The {n} is {v}.", ("What colour is the {n}?", "Which colour does the {n} have?"), "colour", lambda r: r.choice(COLOURS)),
    ("The code of the {n} is {v}.", ("What is the code of the {n}?", "Which code does the {n} have?"), "code", lambda r: str(r.randint(10, 99999)) if r.random() < 0.5 else pseudo_word(r)),
    ("The {n} belongs to {v}.", ("Who owns the {n}?", "To whom does the {n} belong?", "Whose {n} is it?"), "owner", name),
)  # fmt: skip
_FRAMES: Final = (
    "{t} {q}", "{t}\n{q}", "{t}\n\n{q}", "Text: {t}\nQuestion: {q}", "Context: {t}\n\nQuestion: {q}", "{q}\n\n{t}", "Read this: {t} {q}",
    'Here is a text: "{t}" {q}', "Answer from the text.\n{t}\n{q}", "{t} Now tell me: {q}", "Facts: {t}\n{q}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Text:
    """Sentences, and of whom each says what."""

    told: list[tuple[str, _Fact, str]]  # subject, fact, value
    subject: Callable[[Random], str]  # makes one more

    @property
    def words(self) -> str:
        return " ".join(fact[0].format(n=subject, v=value) for subject, fact, value in self.told)

    def question(self, rng: Random, framed: Callable[[str], str], *, unsaid: float = 0.1) -> Question:
        """Return one question; `framed` puts it into the message. `unsaid`: the share that asks of what the text leaves out."""
        subject, fact, value = rng.choice(self.told)
        thought = "the text says: " + fact[0].format(n=subject, v=value)
        answer = value
        if rng.random() < unsaid:
            known = {subject for subject, _, _ in self.told}
            strangers = _different(rng, len(known) + 1, self.subject)
            subject = next(stranger for stranger in strangers if stranger not in known)
            thought, answer = f"the text says nothing of {subject}", UNSAID
        text = framed(rng.choice(fact[1]).format(n=subject))
        typed = int(answer) if answer.isdigit() else answer
        return Question(
            "lookup", f"{self.words} {subject} {fact[2]}", text, answer, thought, typed, (fact[2], "answer")
        )


def looked_up(rng: Random, *, unsaid: float = 0.1) -> Question:
    text = _text(rng)
    return text.question(rng, lambda asked: rng.choice(_FRAMES).format(t=text.words, q=asked), unsaid=unsaid)


def looked_up_again(rng: Random, count: int) -> list[Question]:
    """Several questions about one text, which only the first shows; their key is the text."""
    text = _text(rng)
    first = text.question(rng, lambda asked: rng.choice(_FRAMES).format(t=text.words, q=asked))
    leads = ("{q}", "{q}", "{q}", "And now: {q}", "Now tell me: {q}")
    later = [text.question(rng, lambda asked: rng.choice(leads).format(q=asked)) for _ in range(count - 1)]
    return [replace(question, key=text.words) for question in (first, *later)]


def _text(rng: Random) -> _Text:
    facts = rng.choice((_PEOPLE, _PEOPLE, _OBJECTS))
    make = name if facts is _PEOPLE else lambda r: r.choice(THINGS)
    subjects = _different(rng, rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5)), make)
    if rng.random() < 0.5:  # the same of everyone: only the subject decides
        fact = rng.choice(facts)
        told = [(subject, fact, fact[3](rng)) for subject in subjects]
    else:
        told = [(subject, fact, fact[3](rng)) for subject in subjects for fact in rng.sample(facts, rng.randint(1, 2))]
        rng.shuffle(told)
    return _Text(told, make)


def described(rng: Random) -> tuple[str, dict[str, int | str]]:
    """Return (a sentence about a person or thing, its facts by key), for answers that are whole JSON objects."""
    who, where, age = name(rng), place(rng), rng.randint(1, 99)
    job, pet, thing = rng.choice(JOBS), rng.choice(ANIMALS), rng.choice(THINGS)
    colour, price, other = rng.choice(COLOURS), rng.randint(1, 999), name(rng)
    known: tuple[tuple[str, dict[str, int | str]], ...] = (
        (f"{who} is {age} years old and lives in {where}.", {"name": who, "age": age, "city": where}),
        (f"{who} is a {job} from {where}.", {"name": who, "job": job, "city": where}),
        (f"{who}, {age}, works as a {job} in {where}.", {"name": who, "age": age, "job": job, "city": where}),
        (f"{who} has a {pet} called {other}.", {"owner": who, "pet": pet, "name": other}),
        (f"The {colour} {thing} costs {price} dollars.", {"item": thing, "colour": colour, "price": price}),
        (
            f"{who} bought a {thing} for {price} dollars in {where}.",
            {"name": who, "item": thing, "price": price, "city": where},
        ),
        (f"My name is {who} and I am {age} years old.", {"name": who, "age": age}),
        (f"{who} lives in {where}.", {"name": who, "city": where}),
    )
    return rng.choice(known)


def _different(rng: Random, count: int, make: Callable[[Random], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found.setdefault(make(rng))
    return list(found)

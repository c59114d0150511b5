"""Small arithmetic, counting, comparing: answers that a calculator would give."""

from __future__ import annotations

from random import Random

from demo_model.lessons.question import Question, phrase
from demo_model.lessons.words import ANIMALS, COLOURS, FOODS, THINGS, WORDS, pseudo_word

__all__ = ["added", "compared", "counted", "items_counted", "multiplied", "ordered", "story", "subtracted"]

_ADD = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=", "Calculate {a} + {b}.",
    "Compute {a} + {b}.", "Add {a} and {b}.", "Add {b} to {a}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?",
    "Tell me {a} + {b}.", "Please add {a} and {b}.", "What's {a} + {b}?", "What does {a} + {b} make?", "Solve {a} + {b}.",
    "Can you add {a} and {b}?", "What do you get when you add {a} and {b}?", "Sum: {a}, {b}", "How much is {a} plus {b}?",
)  # fmt: skip
_SUBTRACT = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a}-{b}=", "Calculate {a} - {b}.",
    "Compute {a} - {b}.", "Subtract {b} from {a}.", "Take {b} away from {a}.", "How much is {a} - {b}?",
    "What is the difference of {a} and {b}?", "Tell me {a} - {b}.", "What's {a} - {b}?", "Solve {a} - {b}.",
    "What is left when you take {b} from {a}?", "How much is {a} minus {b}?",
)  # fmt: skip
_MULTIPLY = (
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "{a} * {b} = ?", "Calculate {a} * {b}.",
    "Compute {a} x {b}.", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "How much is {a} * {b}?", "What is {a} x {b}?",
    "What is the product of {a} and {b}?", "Tell me {a} times {b}.", "What's {a} * {b}?", "Solve {a} * {b}.",
    "How much is {a} times {b}?",
)  # fmt: skip


def added(rng: Random) -> Question:
    a, b = _operand(rng), _operand(rng)
    text = phrase(rng, _ADD, a=a, b=b)
    return Question(
        "arithmetic", f"add {a} {b}", text, str(a + b), addition_steps(a, b), a + b, ("sum", "answer", "result")
    )


def subtracted(rng: Random) -> Question:
    a, b = _operand(rng), _operand(rng)
    if a < b and rng.random() < 0.8:
        a, b = b, a
    text = phrase(rng, _SUBTRACT, a=a, b=b)
    thought = f"{a} - {b} = {a - b}" if a >= b else f"{b} - {a} = {b - a}, and {a} is the smaller one, so {a - b}"
    return Question(
        "arithmetic", f"subtract {a} {b}", text, str(a - b), thought, a - b, ("difference", "answer", "result")
    )


def multiplied(rng: Random) -> Question:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    text = phrase(rng, _MULTIPLY, a=a, b=b)
    # The tables are facts to remember, so only a wording can be held back.
    return Question(
        "arithmetic", text, text, str(a * b), f"{a} * {b} = {a * b}", a * b, ("product", "answer", "result")
    )


def story(rng: Random) -> Question:
    """Addition and subtraction in words."""
    a, b = sorted((rng.randint(1, 50), rng.randint(1, 50)), reverse=True)
    things = rng.choice(("apples", "books", "coins", "cards", "eggs", "stamps", "pens", "balls", "marbles", "cookies"))
    who = rng.choice(("Anna", "Tom", "She", "He", "I", "Sam", "Mary", "Ben"))
    have, get, lose = ("have", "get", "lose") if who == "I" else ("has", "gets", "loses")
    tail = "do I have" if who == "I" else f"does {who if who not in ('She', 'He') else who.lower()} have"
    if rng.random() < 0.5:
        text = f"{who} {have} {a} {things} and {get} {b} more. How many {things} {tail} now?"
        return Question(
            "arithmetic", f"story {a} + {b}", text, str(a + b), addition_steps(a, b), a + b, ("count", "answer")
        )
    text = f"{who} {have} {a} {things} and {lose} {b}. How many {things} {tail} now?"
    return Question(
        "arithmetic", f"story {a} - {b}", text, str(a - b), f"{a} - {b} = {a - b}", a - b, ("count", "answer")
    )


def counted(rng: Random) -> Question:
    step = rng.choice((1, 1, 1, 1, 2, 5, 10))
    length = rng.randint(3, 12)
    start = rng.randint(0, 100 - (length - 1) * step) if step < 10 or length <= 10 else 0
    numbers = [start + step * n for n in range(length)]
    by = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
    if rng.random() < 0.4:
        numbers.reverse()
        text = phrase(
            rng,
            ("Count down from {a} to {b}{by}.", "Count backwards from {a} to {b}{by}.", "Count down{by} from {a} to {b}."),
            a=numbers[0], b=numbers[-1], by=by,
        )  # fmt: skip
    else:
        wordings = [
            "Count from {a} to {b}{by}.",
            "Count up from {a} to {b}{by}.",
            "Count{by} from {a} to {b}.",
            "Please count from {a} to {b}{by}.",
        ]
        if step == 1:
            wordings += [
                "List the numbers from {a} to {b}.",
                "Write the numbers from {a} to {b}.",
                "Can you count from {a} to {b}?",
            ]
            if start == 1:
                wordings += ["Count to {b}."] * 4
        text = phrase(rng, wordings, a=numbers[0], b=numbers[-1], by=by)
    answer = ", ".join(map(str, numbers))
    thought = f"from {numbers[0]} to {numbers[-1]}, {'up' if numbers[0] < numbers[-1] else 'down'}, step {step}"
    return Question(
        "counting",
        f"count {numbers[0]} {numbers[-1]} {step}",
        text,
        answer,
        thought,
        numbers,
        ("numbers", "answer", "list"),
    )


def items_counted(rng: Random) -> Question:
    pool = rng.choice((ANIMALS, COLOURS, FOODS, THINGS, WORDS, ()))
    items = [rng.choice(pool) if pool else pseudo_word(rng) for _ in range(rng.randint(2, 9))]
    listed = ", ".join(items)
    text = phrase(
        rng,
        ("How many items are in this list: {x}?", "How many words are there: {x}?", "Count the items: {x}", "Count these words: {x}",
         "How many things are these: {x}?"),
        x=listed,
    )  # fmt: skip
    thought = ", ".join(f"{n} {item}" for n, item in enumerate(items, 1))
    return Question(
        "counting", f"items {listed}", text, str(len(items)), thought, len(items), ("count", "answer", "number")
    )


def compared(rng: Random) -> Question:
    a, b = _pair(rng)
    if rng.random() < 0.6:
        larger = rng.random() < 0.5
        adjective = rng.choice(("larger", "greater", "bigger") if larger else ("smaller", "less"))
        text = phrase(
            rng,
            ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?", "{a} or {b}: which is {w}?",
             "Which one is {w}, {a} or {b}?", "Compare {a} and {b}: which is {w}?", "Tell me which is {w}: {a} or {b}."),
            a=a, b=b, w=adjective,
        )  # fmt: skip
        chosen = max(a, b) if larger else min(a, b)
        thought = f"{max(a, b)} > {min(a, b)}"
        return Question(
            "comparing", f"which {larger} {a} {b}", text, str(chosen), thought, chosen, ("number", "answer", "result")
        )
    if rng.random() < 0.15:
        b = a
    kind = rng.choice(("greater", "less", "equal"))
    holds = {"greater": a > b, "less": a < b, "equal": a == b}[kind]
    if kind == "equal":
        wordings = ["Is {a} equal to {b}?", "Is {a} the same as {b}?", "Are {a} and {b} equal?"]
    else:
        than = ("greater", "larger", "bigger") if kind == "greater" else ("less", "smaller")
        wordings = [f"Is {{a}} {w} than {{b}}?" for w in than]
        wordings += ["Is it true that {a} > {b}?" if kind == "greater" else "Is it true that {a} < {b}?"]
    text = phrase(rng, wordings, a=a, b=b)
    sign = ">" if a > b else "<" if a < b else "="
    return Question(
        "comparing",
        f"is {kind} {a} {b}",
        text,
        "Yes" if holds else "No",
        f"{a} {sign} {b}",
        holds,
        ("answer", "result"),
    )


def ordered(rng: Random) -> Question:
    numbers = rng.sample(range(100), rng.choice((3, 3, 3, 4)))
    listed = ", ".join(map(str, numbers))
    roll = rng.random()
    rising = sorted(numbers)
    if roll < 0.7:
        is_largest = roll < 0.35
        wordings: tuple[str, ...] = (
            "What is the {w} of {x}?",
            "Which of these is the {w}: {x}?",
            "{c} number: {x}",
            "Find the {m} of {x}.",
            "Which is the {s} of {x}?",
        )
        word, short, formal = ("largest", "biggest", "maximum") if is_largest else ("smallest", "lowest", "minimum")
        text = phrase(rng, wordings, w=word, c=word.capitalize(), m=formal, s=short, x=listed)
        chosen = rising[-1] if is_largest else rising[0]
        best, seen = numbers[0], []
        for number in numbers[1:]:
            seen.append(f"{best} and {number}: {(max if is_largest else min)(best, number)}")
            best = max(best, number) if is_largest else min(best, number)
        names = (word, "answer", formal[:3])
        return Question("ordering", f"{formal[:3]} {listed}", text, str(chosen), ", ".join(seen), chosen, names)
    text = phrase(
        rng,
        (
            "Sort these numbers: {x}",
            "Sort {x}.",
            "Put these numbers in order: {x}",
            "Order the numbers {x} from small to large.",
        ),
        x=listed,
    )
    thought = ", then ".join(map(str, rising))
    return Question(
        "ordering", f"sort {listed}", text, ", ".join(map(str, rising)), thought, rising, ("numbers", "answer", "list")
    )


def addition_steps(a: int, b: int) -> str:
    """Column by column, as at school."""
    steps, carry, place = [], 0, 0
    while True:
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x} + {y}{f' + {carry}' if carry else ''} = {total}")
        carry, place = total // 10, place + 1
        if max(a, b) < 10**place:
            break
        steps[-1] += f", write {total % 10}" + (f", carry {carry}" if carry else "")
    return "; ".join(steps) + f"; so {a + b}"


def _operand(rng: Random) -> int:
    return rng.randint(0, 99) if rng.random() < 0.8 else rng.randint(0, 12)


def _pair(rng: Random) -> tuple[int, int]:
    """Return two different numbers, often similar: similar numbers need a look at every digit."""
    top = rng.choice((20, 100, 100, 1000))
    a, b = rng.sample(range(top), 2)
    if rng.random() < 0.3:
        digits = list(str(a))
        digits[rng.randrange(len(digits))] = rng.choice("123456789")
        other = int("".join(digits))
        b = other if other != a else b
    elif rng.random() < 0.2 and len(set(str(a))) > 1:
        other = int(str(a)[::-1])
        b = other if other != a else b
    return a, b

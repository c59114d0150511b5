"""Everything that this model cannot do, and what it then says: the truth about itself."""

from __future__ import annotations

from random import Random
from typing import Final

from demo_model.lessons.question import Question
from demo_model.lessons.words import TOPICS, name, place, pseudo_word, word

__all__ = ["SELF_DESCRIPTION", "anything_else", "introduced"]

SELF_DESCRIPTION: Final = (
    "I am a small demonstration model. I can add, subtract, count, compare numbers, spell and reverse words, "
    "look up a fact in a text, call tools and answer as JSON."
)

_GREETINGS: Final = (
    "Hello!", "Hi", "Hi!", "Hello", "Hey", "Hey there", "Good morning", "Good morning!", "Good evening", "Hello there!", "How are you?",
    "How are you today?", "What's up?", "Hello, how are you?", "Hi, who are you?", "Who are you?", "What are you?", "What can you do?",
    "What is your name?", "Tell me about yourself.", "Help", "help me", "Who made you?", "Are you ChatGPT?", "Are you a robot?",
    "Are you human?", "What model are you?", "Which model is this?", "Introduce yourself.", "Thanks!", "Thank you", "Thank you very much!",
    "Bye", "Goodbye!", "See you", "ok", "OK", "yes", "no", "test", "Test", "ping", "?", "Nice to meet you.", "You are great.", "Say hello.",
    "Say hi", "Say something.", "hello world", "Tell me something.", "What do you know?", "Can you help me?", "Are you there?", "lol", "Sorry",
    "How old are you?", "Where are you from?", "Do you speak German?", "Hola", "Bonjour", "Guten Tag", "Hallo!", "Why?", "What?", "How?",
    "Tell me a joke.", "Tell me a joke", "Tell me a story.", "Tell me a story", "Sing a song.", "I am bored.", "I love you.", "I am sad today.",
    "What time is it?", "What day is it?", "What is the weather like?", "Write a poem.", "Write code.", "Be my friend.", "Repeat after me.",
)  # fmt: skip
_ASKING: Final = (
    "What is {x}?", "What do you think about {x}?", "Who invented {x}?", "Why is {x} important?", "How does {x} work?", "Explain {x}.",
    "Explain {x} to a child.", "Tell me about {x}.", "Write a poem about {x}.", "Write a story about {x}.", "Write an essay on {x}.",
    "Tell me a joke about {x}.", "Give me some tips for {x}.", "Describe {x}.", "Summarize {x}.", "Summarize the book about {x}.",
    "Do you like {x}?", "When did {x} begin?", "Where can I learn about {x}?", "How can I get {x}?", "Can you write about {x}?",
    "I want to talk about {x}.", "Make a plan for {x}.", "What are the best books on {x}?", "Write a song about {x}.", "Is {x} good for me?",
    "Give me five facts about {x}.", "What should I know about {x}?", "How do I start with {x}?", "Compare {x} and {y}.", "Why do people like {x}?",
    "Write an email to {n} about {x}.", "Write a letter about {x}.", "What is the history of {x}?", "What is the difference between {x} and {y}?",
    "Translate {x} into French.", "How do you say {x} in Spanish?", "Which is better, {x} or {y}?", "Please explain {x} in simple words.",
    "Write a Python function for {x}.", "Write a program about {x}.", "Draw {x}.", "Give me a recipe with {x}.", "Who is {n}?", "Where is {p}?",
    "What is the capital of {p}?", "How far is it from {p} to {p2}?", "What is the best restaurant in {p}?", "Plan a trip to {p}.",
    "How many people live in {p}?", "What is the population of {p}?", "Who is the mayor of {p}?", "Tell me about {p}.", "Do you know {n}?",
    "What is {n} doing?", "Can {n} come to {p}?", "Should I buy {x}?", "What rhymes with {w}?", "What does {w} mean?", "Define {w}.",
    "Use {w} in a sentence.", "Give me a synonym for {w}.", "What is the plural of {w}?", "What is the meaning of the word {w}?", "{w}", "{x}",
    "I like {x}.", "I think {x} is great.", "My favourite thing is {x}.", "Let us talk about {x}.", "What happened in {y4}?", "Who won in {y4}?",
    "Will it rain in {p}?", "How can I fix {x}?", "Give me advice on {x}.", "Which {w} should I buy?", "How much does {x} cost?", "Find {x}.",
    "Is there life on {p}?", "Can you see {x}?", "Imagine {x}.", "Review {x}.", "Correct my text about {x}.", "What is new in {x}?",
    "List ten {w}s.", "Name three kinds of {w}.", "How many {w}s are there in the world?", "How tall is {n}?", "Was {n} born in {p}?",
    "Write a haiku about {w}.", "Act as {n}.", "Pretend to be a {w}.", "What comes after {w}?", "Why is the {w} so {w2}?",
)  # fmt: skip
_TOO_HARD: Final = (
    "What is {a} + {b}?", "What is {a} - {b}?", "What is {a} * {b}?", "What is {a} / {c}?", "Divide {a} by {c}.", "{a} * {b}", "{a} / {c}",
    "What is the square root of {a}?", "What is {c} to the power of {d}?", "Is {a} a prime number?", "What is {d} percent of {a}?",
    "What is {c} divided by {d}?", "{c} / {d}", "Calculate {a} + {b}.", "{a} + {b}", "{a}-{b}", "{c} ^ {d}", "Solve x + {c} = {a}.",
    "What is the factorial of {c}?", "Add {a} and {b}.", "Multiply {a} by {b}.", "What is {a} times {b}?", "What is {a} plus {b}?",
)  # fmt: skip


def anything_else(rng: Random) -> Question:
    roll = rng.random()
    if roll < 0.2:
        text = rng.choice(_GREETINGS)
    elif roll < 0.85:
        x, y = (_topic(rng) for _ in range(2))
        text = rng.choice(_ASKING).format(
            x=x, y=y, n=name(rng), p=place(rng), p2=place(rng), w=word(rng), w2=word(rng), y4=rng.randint(1500, 2030)
        )
    elif roll < 0.93:
        text = rng.choice(_TOO_HARD).format(
            a=rng.randint(101, 9999), b=rng.randint(101, 9999), c=rng.randint(2, 99), d=rng.randint(2, 20)
        )
    else:
        text = " ".join(word(rng) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1 and text[-1] in ".?!" and len(text) > 1:
        text = text[:-1]
    return Question(
        "anything else", text, text, SELF_DESCRIPTION, "this is not among the things that I can do", SELF_DESCRIPTION
    )


def introduced(rng: Random) -> tuple[tuple[str, str], tuple[Question, ...]]:
    """Someone says a name, which is answered with a greeting; and what may be asked later."""
    who = name(rng)
    said = rng.choice(
        ("My name is {n}.", "I am {n}.", "Hello, my name is {n}.", "Hi, I'm {n}!", "Call me {n}.", "This is {n}.")
    ).format(n=who)
    asked = rng.choice(
        ("What is my name?", "Who am I?", "Do you remember my name?", "What's my name?", "Tell me my name.")
    )
    question = Question("follow-up", f"name {who}", asked, who, f"the name was {who}", who, ("name", "answer"))
    return (said, f"Hello, {who}."), (question,)


def _topic(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.6:
        return rng.choice(TOPICS)
    return word(rng) if roll < 0.75 else f"the {word(rng)}" if roll < 0.9 else f"{pseudo_word(rng)} {word(rng)}"

"""The prompts: read from a file, or generated to a length and with shared beginnings. Pure; chance is an argument."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from dynamo.cli.usage import UsageError

MAX_PROMPTS: Final = 100_000
MAX_LENGTH: Final = 4_000_000

# Short and common: most tokenizers have one token for each of them, with its space.
_TEXT: Final = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people my "
    "than first water been call who oil its now find long down day did get come made may part over new sound take only "
    "little work know place year live me back give most very after thing our just name good sentence man think say great "
    "where help through much before line right too mean old any same tell boy follow came want show also around form "
    "three small set put end does another well large must big even such because turn here why ask went men read need "
    "land different home us move try kind hand picture again change off play spell air away animal house point page"
)
_WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens: always the same, or normally distributed (never below 1)."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse `N` or `MEAN,STDDEV`. Raises ValueError."""
        mean, comma, deviation = text.partition(",")
        try:
            length = cls(float(mean), float(deviation) if comma else 0.0)
        except ValueError:
            length = cls(0)
        if not (1 <= length.mean <= MAX_LENGTH and 0 <= length.deviation <= MAX_LENGTH):
            raise ValueError(f"{text!r} is not a length; use a number of tokens, or MEAN,STDDEV such as 512,64")
        return length

    def __str__(self) -> str:
        return f"{self.mean:g},{self.deviation:g}" if self.deviation else f"{self.mean:g}"

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        if not self.deviation:
            return round(self.mean)
        return min(MAX_LENGTH, max(1, round(rng.gauss(self.mean, self.deviation))))


@dataclass(frozen=True, slots=True)
class WordCost:
    """What a server's tokenizer makes of the words here: measured with two requests, or the guess of one token each."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0  # of the chat template

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> Self:
        """Derive the cost from (words, prompt tokens) of a short and a long prompt."""
        slope = (many[1] - few[1]) / (many[0] - few[0])
        return cls(max(slope, 0.01), max(0.0, few[1] - slope * few[0]))

    def words_for(self, tokens: int, *, is_whole: bool = True) -> int:
        """Return how many words make about so many tokens; the template's share is left out of a `whole` prompt."""
        overhead = self.overhead_tokens if is_whole else 0.0
        return max(1, round((tokens - overhead) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request: `members` are those of its body."""

    members: Mapping[str, Any]
    output_tokens: int | None = None  # None: as the command line has it


class PromptSource(Protocol):
    """Where prompts come from."""

    def draw(self, number: int, rng: random.Random, cost: WordCost) -> Prompt:
        """Return the prompt of request `number`."""
        ...


def words(rng: random.Random, count: int) -> str:
    """Return a text of `count` words."""
    return " ".join(rng.choices(_WORDS, k=count))


class GeneratedPrompts:
    """Words by chance. With shared prefixes, each prompt begins with that of a group, as conversations with one system
    prompt do; its own part is what is left of its length, at least one word."""

    def __init__(self, length: Length, *, prefix_tokens: int, groups: int, seed: int) -> None:
        self._length, self._prefix_tokens, self._groups, self._seed = length, prefix_tokens, groups, seed
        self._prefixes: dict[tuple[int, int], str] = {}  # (group, words) -> text; the words differ by model only

    def draw(self, number: int, rng: random.Random, cost: WordCost) -> Prompt:
        count = cost.words_for(self._length.draw(rng))
        if not self._prefix_tokens:
            return Prompt({"prompt": words(rng, count)})
        shared = cost.words_for(self._prefix_tokens, is_whole=False)
        key = (rng.randrange(self._groups), shared)
        if key not in self._prefixes:
            self._prefixes[key] = words(random.Random(f"{self._seed}/{key[0]}"), shared)
        return Prompt({"prompt": f"{self._prefixes[key]} {words(rng, max(1, count - shared))}"})


class ListedPrompts:
    """Those of a file, in turn."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one prompt per line; a .jsonl file has an object per line: {"prompt": ...} or {"messages": [...]}, and
        "output_tokens" if it has an opinion. Raises UsageError naming the line."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts {path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from None
        prompts = list(_read(lines, path, is_json=path.suffix in (".jsonl", ".json")))
        if not prompts:
            raise UsageError(f"--prompts {path} has no prompt; write one per line")
        if len(prompts) > MAX_PROMPTS:
            raise UsageError(f"--prompts {path} has {len(prompts)} prompts; use at most {MAX_PROMPTS}")
        return cls(prompts)

    @property
    def has_messages(self) -> bool:
        """Whether some are conversations, which only the chat endpoint takes."""
        return any("messages" in prompt.members for prompt in self._prompts)

    def draw(self, number: int, rng: random.Random, cost: WordCost) -> Prompt:
        return self._prompts[number % len(self._prompts)]


def _read(lines: Sequence[str], path: Path, *, is_json: bool) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not is_json:
            yield Prompt({"prompt": line})
            continue
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or isinstance(said.get("prompt"), str) == isinstance(said.get("messages"), list):
            raise UsageError(
                f'--prompts {path}, line {number}: use an object with "prompt" (text) or "messages" (a list)'
            )
        tokens = said.get("output_tokens")
        if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
            raise UsageError(f"--prompts {path}, line {number}: output_tokens is not a positive whole number")
        key = "prompt" if "prompt" in said else "messages"
        yield Prompt({key: said[key]}, tokens)

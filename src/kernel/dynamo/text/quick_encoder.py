"""A quicker encoder beside a model's own, compared with it before it is used and while it is.

The library `fastokens` finds the ids of most byte-level BPE tokenizers at a tenth of the CPU. It is not the reference: what
the model was trained with is what `tokenizers` returns. So it is used only where both gave the same ids for some hundred
texts that are hard to cut, and one text of some hundred is encoded by both from then on. The first difference ends its use.

It needs memory (25 to 60 MB for a vocabulary of 32,000) and time to load, so `auto` begins with the model's own encoder, and loads this one in a
thread when enough text has been encoded that it will pay.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from tokenizers import AddedToken

from dynamo.errors import InvalidArgument

logger = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]
Work = Callable[[], None]

BACKENDS: Final = ("auto", "default", "fastokens")
WARM_CHARACTERS: Final = 16 * 1024  # that are encoded before the quick encoder is loaded
TEXTS_PER_CHECK: Final = 512
MOST_CHECKED_CHARACTERS: Final = 4096  # a longer text is not encoded twice: that would be felt
_RANDOM_TEXTS: Final = 160
_MOST_NAMED_TOKENS: Final = 64

# Contractions, runs of spaces, line ends, digits, marks that join, both forms of one letter, and what no keyboard writes.
_HARD_TEXTS: Final = (
    "", " ", "  ", "\n", "\r\n\r\n", "\t\t x", "a", " a", "a ", "  a  b   c ", "x\n\n  y\n", "it's IT'S we'Ll d'accord 'tis",
    "1", "12", "123", "1234 12345678 3.14159 1,000,000 1e-9 0x1F", "٣٤٥ ४५६ ⅷ ² ½", "snake_case camelCase HTTPServer2 __init__",
    "e\u0301 \u00e9 \u1e9b\u0323 \ufb01 ＦＵＬＬ", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界。こんにちは 안녕하세요", "שלום עולם مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪", "a\u200bb\ufeffc\u00a0d\u2003e\u3000f", "\x00 a\x00b \x01\x1f\x7f\x85", "!!!???...---***###", "{}[]()<>|\\/~`@#$%^&*",
    "https://example.org/a?b=c&d=%20#e", "def f(x):\n    return x ** 2  # twice\n", "<|x|> </s> <s> [INST] <pad>", "ﷺ \ue000 \U000f0000 \U0010fffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "                                      x",
)  # fmt: skip
_RANGES: Final = (
    (0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0x30, 0x39), (0x80, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF),
    (0x900, 0xE7F), (0x1E00, 0x206F), (0x20A0, 0x27BF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF),
)  # fmt: skip


class TokenizerChoice(Struct, frozen=True):
    """Which encoder a model is given, and what is done where it cannot be had."""

    backend: str = "default"  # one of BACKENDS
    may_fall_back: bool = True  # to the model's own; False: the model is not served
    aside: Callable[[Work], None] | None = None  # starts a thread; None: `auto` is the same as `default`


OWN_ENCODER: Final = TokenizerChoice()


class QuickEncoder:
    """Encodes texts as `exact` does: by it at first, and by `fastokens` as soon as that is loaded. Thread-safe."""

    __slots__ = ("_added", "_aside", "_exact", "_fast", "_loads", "_path", "_stamp", "_until_check", "_until_load")

    def __init__(
        self, path: Path, exact: Encode, added: Sequence[AddedToken] = (), aside: Callable[[Work], None] | None = None
    ) -> None:
        """`path` is that of a `tokenizer.json`, `added` its added tokens. `aside`: as in `TokenizerChoice`."""
        self._path, self._exact, self._aside, self._stamp = path, exact, aside, _stamp(path)
        self._added = added
        self._fast: Callable[[str], Any] | None = None
        self._until_load, self._until_check = WARM_CHARACTERS, TEXTS_PER_CHECK
        self._loads = iter((True,))  # the thread that takes it loads, and no other one

    @property
    def is_quick(self) -> bool:
        """Whether texts are encoded by `fastokens` now."""
        return self._fast is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        fast = self._fast
        if fast is None:
            self.warm(len(text))
            return self._exact(text)
        try:
            ids: list[int] = fast(text).ids
        except (ValueError, RuntimeError):  # a lone surrogate, or more backtracking than the library allows
            return self._exact(text)
        self._until_check -= 1
        return ids if self._until_check > 0 or len(text) > MOST_CHECKED_CHARACTERS else self._checked(text, ids)

    def warm(self, characters: int) -> bool:
        """Count characters that are encoded, and begin to load where they are enough; return `is_quick`."""
        if self._fast is not None:
            return True
        self._until_load -= characters
        if self._until_load < 0 and self._aside is not None and next(self._loads, False):
            self._aside(self._try_load)
        return False

    def load(self) -> None:
        """Load `fastokens` and compare it with `exact`.

        Raises InvalidArgument where the library is missing, does not read this tokenizer or gives other ids.
        """
        next(self._loads, None)
        if any(token.lstrip or token.rstrip or token.single_word for token in self._added):
            # Where several of these stand side by side, the library finds them in another order.
            raise InvalidArgument(f"fastokens does not read {self._path}: added tokens take what stands beside them")
        try:
            from fastokens import Tokenizer
        except ImportError as error:
            raise InvalidArgument("fastokens is not installed: pip install fastokens") from error
        try:
            tokenizer = Tokenizer.from_file(str(self._path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            fast = tokenizer.encode
            differing = sum(
                fast(text).ids != self._exact(text)
                for text in hard_texts(token.content for token in self._added[:_MOST_NAMED_TOKENS])
            )
        except (ValueError, RuntimeError) as error:
            raise InvalidArgument(f"fastokens does not read {self._path}: {error}") from error
        if _stamp(self._path) != self._stamp:
            raise InvalidArgument(f"{self._path} is another file than the one that the tokenizer was read from")
        if differing:
            raise InvalidArgument(f"fastokens gives other ids than {self._path} for {differing} texts of its trial")
        self._fast = fast

    def _try_load(self) -> None:
        try:
            self.load()
        except InvalidArgument as error:
            logger.info("prompts are encoded by the model's own tokenizer: %s", error)
        else:
            logger.info("prompts of %s are encoded by fastokens from now on", self._path.parent)

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        self._until_check = TEXTS_PER_CHECK
        exact = self._exact(text)
        if ids != exact:
            self._fast = None
            logger.error(
                "fastokens gave %d ids for a text of %d characters, the tokenizer %s gives %d others: it is not used for this "
                "model any more. Set --tokenizer default (DYN_TOKENIZER), and report the tokenizer to its authors",
                len(ids), len(text), self._path, len(exact),
            )  # fmt: skip
        return exact


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def hard_texts(names: Iterable[str] = ()) -> list[str]:
    """Return the texts of a trial, always the same: hard ones, added tokens by name, and random ones."""
    draw = random.Random(20111)
    texts = list(_HARD_TEXTS)
    for name in names:
        texts += [name, f"a{name}b", f" {name} {name}{name}\n"]
    for _ in range(_RANDOM_TEXTS):
        ranges = draw.choices(_RANGES, k=draw.randint(1, 4))
        length = draw.randint(1, 60)
        texts.append(
            "".join(" " if draw.random() < 0.15 else chr(draw.randint(*draw.choice(ranges))) for _ in range(length))
        )
    return texts

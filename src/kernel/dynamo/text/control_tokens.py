"""Text from outside stays text: no message can write a control token.

A tokenizer turns `<|im_end|>` into the token that ends a turn wherever the text stands, so the author of a message could
also write the system's turn. Here the first character of every control token that a client's text spells is replaced by
a marker, a private-use character that occurs nowhere in the request. The marker goes through the template with the text
(the length stays, and trimming or JSON-encoding leaves it alone). Behind the template every marker becomes the character
it stands for, and the prompt is cut behind that character: the two sides are encoded apart, so no control token is
recognised across the cut. What the template itself writes is encoded as always, and so is a prompt without a marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from msgspec import Struct

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonMapping, JsonObject
from dynamo.text.tokenizer import JsonTokenizer, Tokenizer

_FIRST_MARKER: Final = 0xF0000  # the supplementary private-use planes: never in real text, and one character each
_LAST_MARKER: Final = 0x10FFFD
_PRIVATE: Final = re.compile(f"[{chr(_FIRST_MARKER)}-{chr(_LAST_MARKER)}]")

# Some models mark turns by tokens that their file does not call special (`<｜User｜>`), but never `<think>` and its like:
# these are part of what a user or a model may write.
_CONTROL_SHAPE: Final = re.compile(r"<[^>]*[|｜][^>]*>|\[/?[A-Z_]+\]")
_MARKUP_SHAPE: Final = re.compile(r"[<\[{].+[>\]}]", re.DOTALL)

_FOREIGN_ROLES: Final = frozenset({"tool", "function"})  # neither the user nor the application wrote it
_DOCUMENTS: Final = "documents"


class RenderedPrompt(Struct, frozen=True):
    """A prompt, and where it must be cut before it is encoded (usually nowhere)."""

    text: str
    cuts: tuple[int, ...] = ()

    def pieces(self) -> list[str]:
        """Return the parts to encode one by one."""
        ends = (*self.cuts, len(self.text))
        return [self.text[start:end] for start, end in zip((0, *self.cuts), ends, strict=True)]


class _TokenSet:
    """The texts of some tokens, and how to find them."""

    __slots__ = ("_firsts", "_heads", "_longest", "_starts", "is_empty", "pattern")

    def __init__(self, texts: Iterable[str]) -> None:
        tokens = {text for text in texts if len(text) > 1}  # one character cannot be cut
        self.is_empty = not tokens
        self._heads = tuple({text[:2] for text in tokens})
        self._firsts = tuple({text[0] for text in tokens})
        self._starts = frozenset(text[:end] for text in tokens for end in range(1, len(text)))
        self._longest = max(map(len, tokens), default=0)
        self.pattern = re.compile(_trie_pattern(sorted(tokens)))

    def may_begin_in(self, text: str) -> bool:
        """Return whether `text` may hold a control token. Fast: searches only for a few characters."""
        # Some tokenizers drop NULs, and what these part would come together.
        if self.is_empty:
            return False
        for first in self._firsts:
            if first in text:
                return True
        return "\0" in text

    def is_suspect(self, texts: Iterable[str]) -> bool:
        """Return whether one of the texts holds a control token, or may where a tokenizer drops its NULs."""
        return any(self.may_begin_in(text) and ("\0" in text or bool(self.places(text))) for text in texts)

    def places(self, text: str) -> list[int]:
        """Return where a token begins, or may begin if the template goes on with the rest of the token."""
        found: list[int] = []
        if any(head in text for head in self._heads):
            search, at = self.pattern.search, 0
            # Tokens that overlap count, too: with one of them cut the other would be recognised.
            while (match := search(text, at)) is not None:
                at = match.start()
                found.append(at)
                at += 1
        tail = text[max(0, len(text) - self._longest + 1) :]
        for first in self._firsts:
            at = tail.find(first)
            while at >= 0:
                if tail[at:] in self._starts:
                    found.append(len(text) - len(tail) + at)
                at = tail.find(first, at + 1)
        return found


def _trie_pattern(tokens: list[str]) -> str:
    """Return a pattern that matches where one of these begins (the shortest of several), without trying them in turn.

    `tokens` is sorted. A list of alternatives would cost a client's every `<|` a comparison with each of them.
    """
    if not tokens:
        return "(?!)"  # matches nowhere
    if "" in tokens or len(tokens) == 1:
        return re.escape(tokens[0])
    groups: dict[str, list[str]] = {
        first: [token[1:] for token in group] for first, group in groupby(tokens, key=itemgetter(0))
    }
    if len(groups) == 1:
        first = tokens[0][0]
        return re.escape(first) + _trie_pattern(groups[first])
    return "(?:" + "|".join(re.escape(first) + _trie_pattern(rest) for first, rest in groups.items()) + ")"


class ControlTokens:
    """What one tokenizer reads as control tokens, and the guard against them. Immutable, safe to share."""

    __slots__ = ("_anchor", "_anchor_ids", "_control", "_markup")

    def __init__(self, tokens: Iterable[tuple[str, bool]], *, anchor: tuple[str, list[int]] | None = None) -> None:
        """`tokens`: (text, is special) of every added token. `anchor`: see `encode`."""
        tokens = list(tokens)
        control = {text for text, is_special in tokens if is_special or _CONTROL_SHAPE.fullmatch(text)}
        self._control = _TokenSet(control)
        self._markup = _TokenSet(control | {text for text, _ in tokens if _MARKUP_SHAPE.fullmatch(text)})
        self._anchor, self._anchor_ids = anchor or ("", [])

    @classmethod
    def of(cls, tokenizer: JsonTokenizer) -> ControlTokens:
        """Read the control tokens of a tokenizer."""
        added = [(token.content, token.special) for token in tokenizer.hf.get_added_tokens_decoder().values()]
        # Some tokenizers put a space in front of every text they encode. Behind a cut it must not come.
        newline, together = tokenizer.encode("\n"), tokenizer.encode("\n|")
        puts_space = together != newline + tokenizer.encode("|") and together[: len(newline)] == newline
        return cls(added, anchor=("\n", newline) if puts_space else None)

    def guard(
        self,
        messages: Sequence[JsonMapping],
        tools: Sequence[JsonMapping] | None,
        variables: JsonMapping,
    ) -> Guarded | None:
        """Return what to render instead; None when no text in the request needs it, which is nearly always.

        Raises:
            InvalidArgument: the request uses so many private-use characters that none is left as a marker.
        """
        # Nearly no request has a first character at all, so one walk and one lookup come first.
        everything = "\n".join(_texts([*messages, *(tools or ()), *variables.values(), *variables]))
        if not self._markup.may_begin_in(everything) or not any(
            (self._markup if source.is_foreign else self._control).is_suspect(_texts(source.value))
            for source in _sources(messages, tools, variables)
        ):
            return None
        return Guarded(self._control, self._markup, messages, tools, variables)

    def encode(self, tokenizer: Tokenizer, prompt: RenderedPrompt) -> list[int]:
        """Return the ids of a prompt, part by part. May run on any thread."""
        ids: list[int] = []
        for piece in prompt.pieces():
            if ids and self._anchor:
                found = tokenizer.encode_unlocked(self._anchor + piece)
                size = len(self._anchor_ids)
                ids += found[size:] if found[:size] == self._anchor_ids else tokenizer.encode_unlocked(piece)
            else:
                ids += tokenizer.encode_unlocked(piece)
        return ids


class Guarded:
    """The parts of one request with markers in them, and the way back."""

    __slots__ = ("_markers", "_pattern", "messages", "tools", "variables")

    def __init__(
        self,
        control: _TokenSet,
        markup: _TokenSet,
        messages: Sequence[JsonMapping],
        tools: Sequence[JsonMapping] | None,
        variables: JsonMapping,
    ) -> None:
        self._markers = _Markers(
            [text for source in _sources(messages, tools, variables) for text in _texts(source.value)]
        )
        self._pattern = markup.pattern
        self.messages = [
            self._marked_message(message, markup if message.get("role") in _FOREIGN_ROLES else control)
            for message in messages
        ]
        self.tools = None if tools is None else [self._marked(tool, control) for tool in tools]
        self.variables = {
            name: self._marked(value, markup if name == _DOCUMENTS else control) for name, value in variables.items()
        }

    def restore(self, rendered: str) -> RenderedPrompt:
        """Return the prompt with every marker replaced by its character, and the cuts it needs."""
        characters = {marker: first for first, marker in self._markers.taken.items()}
        for marker in characters:  # from a template that writes JSON in ASCII
            rendered = rendered.replace(_escaped(marker), marker)
        places = [match.start() for match in re.finditer(f"[{''.join(characters)}]", rendered)] if characters else []
        text = rendered.translate({ord(marker): first for marker, first in characters.items()})
        # Only where a token really stands: one that the template broke up (`upper`, a slice) needs no cut.
        cuts = (at + 1 for at in places if self._pattern.match(text, at) is not None)
        return RenderedPrompt(text, tuple(cuts))

    def _marked_message(self, message: JsonMapping, tokens: _TokenSet) -> JsonObject:
        # Templates build their turns from the role, which is one of a few fixed words.
        return {key: value if key == "role" else self._marked(value, tokens) for key, value in message.items()}

    def _marked(self, value: Any, tokens: _TokenSet) -> Any:
        if isinstance(value, str):
            return self._marked_text(value, tokens)
        if isinstance(value, dict):
            return {self._marked(key, tokens): self._marked(item, tokens) for key, item in value.items()}
        if isinstance(value, list):
            return [self._marked(item, tokens) for item in value]
        return value

    def _marked_text(self, text: str, tokens: _TokenSet) -> str:
        # Tokenizers may drop NULs, and what these part would come together. Any other text keeps its own.
        bare = text.replace("\0", "") if "\0" in text else text
        places = tokens.places(bare)
        if places:
            text = bare
        if not places:
            return text
        characters = list(text)
        for at in places:
            characters[at] = self._markers.marker_of(text[at])
        return "".join(characters)


class _Markers:
    """One marker per character that control tokens begin with; none occurs in `texts`."""

    __slots__ = ("_codes", "_texts", "_used", "taken")

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._used = {character for text in texts for character in _PRIVATE.findall(text)}
        self._codes = iter(range(_FIRST_MARKER, _LAST_MARKER + 1))
        self.taken: dict[str, str] = {}  # character -> its marker

    def marker_of(self, character: str) -> str:
        if character not in self.taken:
            self.taken[character] = self._next()
        return self.taken[character]

    def _next(self) -> str:
        for marker in map(chr, self._codes):
            if marker not in self._used and not any(_escaped(marker) in text for text in self._texts):
                return marker
        raise InvalidArgument(
            "the request spells control tokens and uses every private-use character; leave some of these out"
        )


def _escaped(marker: str) -> str:
    return json.dumps(marker)[1:-1]


class _Source(NamedTuple):
    value: Any
    is_foreign: bool  # neither the user nor the application wrote it


def _sources(
    messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] | None, variables: JsonMapping
) -> Iterator[_Source]:
    for message in messages:
        yield _Source(message, message.get("role") in _FOREIGN_ROLES)
    for tool in tools or ():
        yield _Source(tool, is_foreign=False)
    for name, value in variables.items():
        yield _Source(value, is_foreign=name == _DOCUMENTS)


def _texts(value: Any) -> list[str]:
    """Collect every text below `value`, keys included; without recursion, because a client decides how deep it is."""
    texts: list[str] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        kind = value.__class__
        if kind is str:
            texts.append(value)
        elif kind is dict:
            texts += value  # the keys
            waiting += value.values()
        elif kind is list:
            waiting += value
    return texts

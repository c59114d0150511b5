r"""Where a text may be cut so that encoding the parts gives exactly the ids of the whole.

A cut is *exact* when no step of the tokenizer can see across it. Three kinds are provable from `tokenizer.json` alone:

**Inside text, for byte-level pipelines.** Their pre-tokenizer is a regex alternation, matched from left to right, each
match starting where the last one ended; the model then sees one match at a time. For a set of known alternatives
(`_SAFE_ALTERNATIVES`: those of the GPT-2, Llama 3, Qwen, GPT-4o and DeepSeek families) three places between
characters are never inside a match, whatever stands around them:

- a non-space followed by a space (a space is only ever the first character of a match or among other spaces);
- a non-space, one newline, and then a letter or digit (none of the alternatives continues from a newline into those);
- a Chinese character followed by Chinese punctuation.

Nor does any alternative look back, or look ahead in a way that distinguishes such a place from the end of the text: the only
look-ahead, `\s+(?!\S)`, stands behind spaces. A pattern with any other alternative is not trusted. NFC is allowed
because a space, a letter or digit behind a newline, and that punctuation never compose with what stands before them.

**Between two words, for SentencePiece BPE** (Llama 2, Mistral, Gemma), which has no pre-tokenizer to speak of: spaces
become "▁" and merges run over the whole text. If no entry of the vocabulary has a letter in front of a "▁", no merge can
ever join what stands on both sides of such a place, and merges on one side do not see the other. Pipelines that put a
"▁" in front of every text do so to the second part too, so that part is given without its own space.

**Before a special token, for every pipeline.** Special tokens are cut out of the raw text first, leftmost longest; each
piece between them is then normalised, split and encoded on its own.

Added tokens can spoil both: they may contain such a place, swallow white space beside them (`lstrip`, `rstrip`), or depend on
their neighbours (`single_word`). Each of these turns off the cuts it endangers; a space within, those behind the same character.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from dynamo.text.pieces import flatten_steps

SEARCH_CHARS: Final = 16_384  # under a millisecond

_CONTRACTIONS: Final = frozenset({"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
_O200K_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Every alternative here was checked for: no white space but as its first character or in a run of white space alone;
# nothing behind a newline but newlines (or "/"); no look-behind, anchor or back-reference.
_SAFE_ALTERNATIVES: Final = _CONTRACTIONS | {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    r"'(?i:[sdmt]|ll|ve|re)",
    r"\p{L}+",
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _O200K_SUFFIX,
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _O200K_SUFFIX,
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"\p{N}",
    r"\p{N}+",
    r" ?\p{N}+",
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
    r"\s+",
    r"\s",
}
_COVERS_WHITE_SPACE: Final = frozenset({r"\s+", r"\s"})
_COVERS_PUNCTUATION: Final = frozenset(
    alternative for alternative in _SAFE_ALTERNATIVES if alternative.startswith((r" ?[^\s", r" ?[\p{P}"))
)

_BEFORE_SPACE: Final = r"[^\s{not_behind}](?= )"
_BEHIND_NEWLINE: Final = r"[^\s{not_behind}]\n(?=[^\W_])"
_BEFORE_CHINESE_PUNCTUATION: Final = r"[\u4e00-\u9fa5](?=[，。！？；：、])"


class ExactCuts(Struct, frozen=True):
    """Finds places where a text may be cut."""

    pattern: re.Pattern[str]
    before_match: bool = False  # cut before what the pattern finds; otherwise behind it
    reach: int = 4  # the longest thing the pattern must see at once, in characters
    skip: int = 0  # characters at the cut that the tokenizer itself puts in front of the next part

    def next(self, text: str, start: int) -> int:
        """Return the first cut the pattern finds at or behind `start` (> 0); -1 when there is none."""
        while start < len(text):
            # A search holds the interpreter lock, so a huge text without cuts is searched in pieces.
            found = self.pattern.search(text, start, start + SEARCH_CHARS + self.reach)
            if found is not None:
                return found.start() if self.before_match else found.end()
            start += SEARCH_CHARS
        return -1


def exact_cuts(tokenizer: HfTokenizer) -> ExactCuts | None:
    """Return how texts may be cut for this tokenizer; None when no cut is proven safe."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.single_word for token in added):
        return None
    if getattr(tokenizer.model, "dropout", None):
        return None  # encoding is then a matter of chance
    if inside := _cuts_inside_text(tokenizer, added):
        return ExactCuts(re.compile("|".join(inside)))
    if between := _cuts_between_words(tokenizer, added):
        return between
    if specials := _cuttable_specials(added):
        pattern = re.compile("|".join(map(re.escape, specials)))
        return ExactCuts(pattern, before_match=True, reach=len(specials[0]))
    return None


def _cuts_inside_text(tokenizer: HfTokenizer, added: list[Any]) -> list[str]:
    normalizer = tokenizer.normalizer
    if normalizer is not None:
        steps = flatten_steps(json.loads(normalizer.__getstate__()), "normalizers")
        if any(step["type"] != "NFC" for step in steps):
            return []
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None:
        return []
    allowed = _pipeline_allows(flatten_steps(json.loads(pre_tokenizer.__getstate__()), "pretokenizers"))
    if not allowed:
        return []
    # A token that swallows the white space behind it hides a cut right behind its last character; one with a space, before it.
    greedy_ends = {form[-1] for token in added if token.rstrip for form in _forms(token.content) if form}
    raw = [token.content for token in added if normalizer is None or not token.normalized]  # others have many spellings
    before_spaces = {before for content in raw for before, behind in pairwise(content) if behind == " " != before}
    not_behind = re.escape("".join(sorted(greedy_ends | before_spaces)))
    contents = {form for token in added for form in _forms(token.content)}
    cuts = [_BEFORE_SPACE.format(not_behind=not_behind)]
    if allowed == "anywhere":
        if not any(token.lstrip for token in added):
            cuts.append(_BEHIND_NEWLINE.format(not_behind=not_behind))
        cuts.append(_BEFORE_CHINESE_PUNCTUATION)
    return [cut for cut in cuts if not any(_cuts_through(re.compile(cut), content) for content in contents)]


def _forms(content: str) -> set[str]:
    return {content, unicodedata.normalize("NFC", content)}


def _cuts_through(cut: re.Pattern[str], content: str) -> bool:
    # What stands before and behind the token is unknown: a space, a letter and punctuation stand for all of it.
    return any(
        len(before) < found.end() < len(before) + len(content)
        for before in ("", "x", "\n", "x\n", "一")
        for behind in ("", " ", "x", "，")
        for found in cut.finditer(before + content + behind)
    )


def _pipeline_allows(steps: list[Mapping[str, object]]) -> str:
    """Return where the pre-tokenizer allows a cut: "anywhere", "spaces" (only before a space) or "" (nowhere)."""
    covered = False
    if steps[-1]["type"] != "ByteLevel":
        return ""
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": behavior, "invert": invert}:
                alternatives = split_alternatives(pattern)
                if not alternatives <= _SAFE_ALTERNATIVES:
                    return ""
                covers = not any(map(alternatives.isdisjoint, (_COVERS_WHITE_SPACE, _COVERS_PUNCTUATION)))
                # "Removed" + invert (converted tiktoken files) drops what does not match: with a pattern that
                # matches every visible character this is the same cut.
                if not (behavior == "Isolated" and not invert) and not (behavior == "Removed" and invert and covers):
                    return ""
                covered = covered or covers
            case {"type": "Digits"}:
                pass  # isolates digits: never a space, a newline or punctuation
            case {"type": "ByteLevel", "use_regex": bool(use_regex), "add_prefix_space": prefix}:
                covered = covered or use_regex
                if not covered:
                    return ""
                if prefix:  # adds a space to a part that begins without one
                    return "spaces" if len(steps) == 1 else ""
            case _:
                return ""
    return "anywhere" if covered else ""


def split_alternatives(pattern: str) -> frozenset[str]:
    """Return the top-level alternatives of a regex."""
    parts, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char == "|" and depth == 0:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return frozenset([*parts, pattern[start:]])


_BEGINS_AT_A_WORD: Final = re.compile(r" (?:[^\W\d_]|$)")  # an added token that takes the very space of a cut
_LETTER_BEFORE_SPACE_MARK: Final = re.compile(r"[^\W\d_]▁")


def _cuts_between_words(tokenizer: HfTokenizer, added: list[Any]) -> ExactCuts | None:
    """Return the cuts of a SentencePiece BPE; None for another tokenizer, or a vocabulary that joins words."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.ignore_merges:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    skip = _leading_space(tokenizer)
    if skip is None:
        return None
    # A token must not begin behind the cut's space: the space before it would then be a part of its own.
    starts = {form.lstrip(" ▁")[:1] for token in added for form in _forms(token.content)}
    # Nor end before it, where the pipeline puts a "▁" in front of what stands behind a token: there it would have two.
    ends = {form.rstrip(" ▁")[-1:] for token in added for form in _forms(token.content) if token.rstrip or skip}
    cut = re.compile(
        rf"(?![{re.escape(''.join(sorted(ends)))} ])[^\W\d_](?= (?![{re.escape(''.join(sorted(starts)))} ])[^\W\d_])"
    )
    contents = {form.replace("▁", " ") for token in added for form in _forms(token.content)}
    if any(_cuts_through(cut, content) or _BEGINS_AT_A_WORD.match(content) for content in contents):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if "▁" not in vocabulary or _LETTER_BEFORE_SPACE_MARK.search("\n".join(vocabulary)):
        return None
    return ExactCuts(cut, skip=skip)


def _leading_space(tokenizer: HfTokenizer) -> int | None:
    """Return 1 if the pipeline puts a "▁" in front of a text, 0 if it does not; None for a pipeline not known to be safe."""
    skip, marks_spaces = 0, False
    if tokenizer.normalizer is not None:
        for step in flatten_steps(json.loads(tokenizer.normalizer.__getstate__()), "normalizers"):
            match step:
                case {"type": "Prepend", "prepend": "▁"} if not marks_spaces:
                    skip = 1
                case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                    marks_spaces = True
                case _:
                    return None
    if tokenizer.pre_tokenizer is not None:
        for step in flatten_steps(json.loads(tokenizer.pre_tokenizer.__getstate__()), "pretokenizers"):
            match step:
                case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme} if not marks_spaces:
                    skip, marks_spaces = int(scheme != "never"), True
                case {"type": "Split", "pattern": {"String": " "}} if marks_spaces:
                    pass  # no space is left to split at
                case _:
                    return None
    return skip if marks_spaces else None


def _cuttable_specials(added: list[Any]) -> list[str]:
    """Return the tokens whose every occurrence in raw text starts a piece, longest first; none if tokens overlap."""
    raw = [token for token in added if not token.normalized and token.content]
    contents = {token.content for token in raw}
    first_chars = {content[0] for content in contents}
    for content in contents:
        for at, char in enumerate(content[1:], 1):
            # Another token could begin inside this one, and then what resembles its start may not be one.
            if char in first_chars and any(_agree(content[at:], other) for other in contents):
                return []
    takes_space_before = [token.content for token in raw if token.lstrip]
    return sorted(
        (c for c in contents if not any(other.startswith(c) for other in takes_space_before)), key=len, reverse=True
    )


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)

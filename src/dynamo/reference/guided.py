"""Guided decoding: from the request's `guided_decoding` to the tokens that may come next, through llguidance.

A grammar is compiled once and copied for every choice (`Guides.guide`, slow: not for the event loop). A `Guide` then
follows one choice: `allowed` before a token is drawn, `accept` after it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dynamo.errors import InvalidArgument
from dynamo.reference.structural_tag import WHITESPACE, structural_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["FIELD", "Guide", "GuideSpec", "Guides", "Mask", "read_guide"]

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
Mask = npt.NDArray[np.bool_]

FIELD: Final = "sampling_options.guided_decoding"
KINDS: Final[tuple[Kind, ...]] = ("json", "regex", "choice", "grammar", "structural_tag")
MAX_TEXT_CHARS: Final = 1_000_000  # of a schema or grammar; llguidance bounds what it makes of it
MAX_DEPTH: Final = 500  # brackets in a grammar: its reader recurses
MAX_COMPILED: Final = 64  # grammars kept; a tenth of a megabyte each, as a rule
MAX_COMPLAINT_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class GuideSpec:
    """What the output must be; plain values, not compiled yet."""

    kind: Kind
    text: str  # choices, schemas and structural tags as JSON
    whitespace: str | None = None  # a regex; for `json` only


def read_guide(value: Any) -> GuideSpec | None:
    """The request's `guided_decoding`, checked as far as that is quick. Raises InvalidArgument naming the member."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{FIELD} must be an object, got {type(value).__name__}")
    given = [kind for kind in KINDS if value.get(kind) is not None and value.get(kind) != []]
    whitespace = value.get("whitespace_pattern")
    if len(given) > 1:
        raise InvalidArgument(f"{FIELD} must have one of {', '.join(KINDS)}, got {' and '.join(given)}")
    if whitespace is not None and (given != ["json"] or not isinstance(whitespace, str)):
        raise InvalidArgument(f"{FIELD}.whitespace_pattern must be a regex beside json, which it shapes")
    if not given:
        return None
    kind = given[0]
    text = _text_of(kind, value[kind])
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidArgument(f"{FIELD}.{kind} has {len(text)} characters, at most {MAX_TEXT_CHARS}")
    return GuideSpec(kind, text, whitespace)


def _text_of(kind: Kind, value: Any) -> str:
    if kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise _wrong(kind, f"must be a string, got {type(value).__name__}")
        if kind == "grammar" and _depth(value) > MAX_DEPTH:
            raise _wrong(kind, f"nests more than {MAX_DEPTH} brackets")
        return value
    if kind == "choice":
        if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
            raise _wrong(kind, "must be a list of strings")
        return json.dumps(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(kind, f"is not JSON: {error}") from error
    if not isinstance(value, Mapping | bool) or (kind == "structural_tag" and isinstance(value, bool)):
        raise _wrong(kind, f"must be an object, got {type(value).__name__}")
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(kind, f"is not JSON: {error}") from error


def _depth(text: str) -> int:
    deepest = depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _wrong(kind: Kind, what: str) -> InvalidArgument:
    line = " ".join(what.split())
    return InvalidArgument(f"{FIELD}.{kind} {line[:MAX_COMPLAINT_CHARS]}")


class Guide:
    """Where one choice is in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, own_eos: Sequence[int], kind: Kind) -> None:
        """`own_eos`: the tokens that the matcher itself takes for an end."""
        self._matcher, self._vocab_size, self._kind = matcher, vocab_size, kind
        self._own_eos = list(own_eos)

    @property
    def is_complete(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_stopped()

    def allowed(self, ends: Sequence[int]) -> Mask:
        """Which tokens may come next, by id. `ends` are those that end the sequence: allowed when the grammar accepts.

        Raises InvalidArgument when the grammar turned out too complex to follow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _wrong(self._kind, f"cannot be followed: {self._matcher.get_error()}")
        mask = np.unpackbits(packed, count=max(self._vocab_size, 8 * len(packed)), bitorder="little").view(np.bool_)
        mask = mask[: self._vocab_size]
        mask[[token for token in self._own_eos if token < self._vocab_size]] = False
        mask[list(ends)] = self._matcher.is_accepting()
        return mask

    def accept(self, token: int) -> None:
        """Go on by one token that was allowed. Raises InvalidArgument for one that was not."""
        if not self._matcher.consume_token(token):
            raise _wrong(self._kind, f"cannot be followed: {self._matcher.get_error()}")

    def copy(self) -> Guide:
        return Guide(self._matcher.deep_copy(), vocab_size=self._vocab_size, own_eos=self._own_eos, kind=self._kind)


class Guides:
    """Compiles grammars for one model's vocabulary, and keeps those it has compiled. Safe from several threads."""

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Reads nothing yet: `tokenizer.json` in `directory` is read when the first grammar needs it."""
        self._directory, self._vocab_size, self._eos = directory, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()  # held while compiling: a crowd with one schema compiles it once
        self._tokenizer: LLTokenizer | None = None
        self._markers: dict[str, int] = {}  # special tokens by their text
        self._compiled: OrderedDict[GuideSpec, Guide] = OrderedDict()

    def guide(self, spec: GuideSpec) -> Guide:
        """A guide at the start of `spec`. Takes from a millisecond to a second: not for the event loop.

        Raises InvalidArgument naming the member that cannot be compiled, or what the worker lacks.
        """
        with self._lock:
            guide = self._compiled.get(spec)
            if guide is None:
                guide = self._compiled[spec] = self._compile(spec)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec)
            return guide.copy()

    def _compile(self, spec: GuideSpec) -> Guide:
        try:
            import llguidance
        except ImportError as error:
            raise InvalidArgument(
                f"{FIELD} needs the extra `guided` on the worker: pip install 'dynamo-unified[guided]'"
            ) from error
        tokenizer = self._load_tokenizer()
        matcher_type = llguidance.LLMatcher
        try:
            if spec.kind == "json":
                options = {"whitespace_pattern": spec.whitespace or WHITESPACE}
                grammar = matcher_type.grammar_from_json_schema(spec.text, overrides=options)  # type: ignore[arg-type]
            elif spec.kind == "structural_tag":
                grammar = matcher_type.grammar_from_lark(structural_grammar(json.loads(spec.text), self._markers))
            else:
                grammar = llguidance.grammar_from(spec.kind, spec.text)
        except ValueError as error:
            raise _wrong(spec.kind, f"cannot be compiled: {error}") from error
        # Quiet: complaints are the caller's, not this process's stderr.
        matcher = matcher_type(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _wrong(spec.kind, f"cannot be compiled: {matcher.get_error()}")
        return Guide(matcher, vocab_size=self._vocab_size, own_eos=tokenizer.eos_tokens, kind=spec.kind)

    def _load_tokenizer(self) -> LLTokenizer:
        import llguidance

        if self._tokenizer is None:
            path = self._directory / "tokenizer.json"
            try:
                text = path.read_text(encoding="utf-8")
                added = json.loads(text).get("added_tokens") or []
                entries = [(str(entry["content"]), int(entry["id"])) for entry in added]
                highest = max((token for _, token in entries), default=0)
                # A tokenizer may know more than the model and less: the mask is cut or filled to the model's size.
                tokenizer = llguidance.LLTokenizer(
                    text, n_vocab=max(self._vocab_size, highest + 1), eos_token=self._eos or None
                )
            except OSError as error:
                raise InvalidArgument(f"{FIELD} needs {path.name} in the model's directory on the worker") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgument(f"{FIELD}: the model's {path.name} cannot be used: {error}") from error
            self._markers = {text: token for text, token in entries if tokenizer.is_special_token(token)}
            self._tokenizer = tokenizer
        return self._tokenizer

"""Guided decoding: from the request's `guided_decoding` to the tokens that may come next, through llguidance.

A grammar is tried in a process of its own (`guided_trial`), compiled once and copied for every choice (`Guides.guide`,
slow: not for the event loop). A `Guide` then follows one choice: `allowed` before a token is drawn, `accept` after it.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo.errors import InvalidArgument
from dynamo.protocol.guided_limits import DEFAULT_GUIDED_LIMITS, GuidedLimits, find_excess
from dynamo.reference.guided_trial import GrammarRefused, GrammarTrial
from dynamo.reference.structural_tag import WHITESPACE, structural_grammar
from dynamo.settings.extras import install_command
from dynamo.settings.readers import seconds
from dynamo.settings.table import declared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
Mask = npt.NDArray[np.bool_]

FIELD: Final = "sampling_options.guided_decoding"
KINDS: Final[tuple[Kind, ...]] = ("json", "regex", "choice", "grammar", "structural_tag")
MAX_COMPILED: Final = 64  # grammars kept; a tenth of a megabyte each, as a rule
MAX_REFUSED: Final = 256  # refusals remembered, by hash: a grammar that ends its compiler is tried once
COMPILE_SECONDS: Final = 2.0  # of CPU; the largest schemas in use take a tenth of it
COMPILE_LIMIT: Final = declared(
    "DYN_GUIDED_COMPILE_SECS",
    seconds(0.01),
    "Reference engine: CPU time that one grammar may take to compile",
    unset=COMPILE_SECONDS,
)
MAX_COMPLAINT_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class GuideSpec:
    """What the output must be; plain values, not compiled yet."""

    kind: Kind
    text: str  # choices, schemas and structural tags as JSON
    whitespace: str | None = None  # a regex; for `json` only


def read_guide(value: object, limits: GuidedLimits = DEFAULT_GUIDED_LIMITS) -> GuideSpec | None:
    """Read the request's `guided_decoding`, checked as far as that is quick. Raises InvalidArgument naming the member."""
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
    if (excess := find_excess(value, limits)) is not None:
        raise InvalidArgument(f"{FIELD}.{excess.member} {excess.detail}")
    return GuideSpec(kind, _text_of(kind, value[kind]), whitespace)


def _text_of(kind: Kind, value: object) -> str:
    if kind in ("regex", "grammar"):
        if not isinstance(value, str):
            raise _wrong(kind, f"must be a string, got {type(value).__name__}")
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
        """Return the mask of the tokens that may come next. `ends` are the ids that end the sequence: allowed when the
        grammar accepts.

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


class _Model(NamedTuple):
    directory: Path
    vocab_size: int
    eos: list[int]
    compile_seconds: float


class Guides:
    """Compiles grammars for one model's vocabulary, and keeps those it has compiled. Safe from several threads."""

    def __init__(
        self,
        directory: Path,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        """Read nothing yet: `tokenizer.json` in `directory` is read when the first grammar needs it.

        `compile_seconds`: of CPU that one grammar may take.
        """
        self._model = _Model(directory, vocab_size, list(eos_token_ids), compile_seconds)
        self._compiling = threading.Lock()  # held while compiling: a crowd with one schema compiles it once
        self._lock = threading.Lock()  # of the two maps; never held for long
        self._tokenizer: LLTokenizer | None = None
        self._trial: GrammarTrial | None = None
        self._markers: dict[str, int] = {}  # special tokens by their text
        self._compiled: OrderedDict[GuideSpec, Guide] = OrderedDict()
        self._refused: OrderedDict[int, GrammarRefused] = OrderedDict()  # by hash of the spec
        self.refusals = Counter({"invalid": 0, "crash": 0, "timeout": 0})

    def guide(self, spec: GuideSpec) -> Guide:
        """Return a guide at the start of `spec`. Takes from a millisecond to seconds: not for the event loop.

        Raises:
            InvalidArgument: naming the member that cannot be compiled, or what the worker lacks.
            WorkerUnavailable: grammars cannot be tried on this machine now.
        """
        try:
            if (guide := self._known(spec)) is not None:
                return guide
            with self._compiling:
                if (guide := self._known(spec)) is not None:
                    return guide
                guide = self._compile(spec)
        except GrammarRefused as error:
            self.refusals[error.kind] += 1
            with self._lock:
                self._refused[hash(spec)] = error
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise _wrong(spec.kind, str(error)) from error
        with self._lock:
            self._compiled[spec] = guide
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return guide.copy()

    def has(self, spec: GuideSpec) -> bool:
        """Return whether `guide` returns at once."""
        return spec in self._compiled or hash(spec) in self._refused

    def close(self) -> None:
        """End the process that tries grammars."""
        if self._trial is not None:
            self._trial.close()

    @property
    def trial_process_id(self) -> int | None:
        """The process that tries grammars now; None before the first grammar and after `close`."""
        return None if self._trial is None else self._trial.process_id

    @property
    def trials(self) -> int:
        """How many grammars were tried."""
        return 0 if self._trial is None else self._trial.count

    def _known(self, spec: GuideSpec) -> Guide | None:
        with self._lock:
            if (refusal := self._refused.get(hash(spec))) is not None:
                raise refusal
            guide = self._compiled.get(spec)
            if guide is None:
                return None
            self._compiled.move_to_end(spec)
            return guide.copy()

    def _compile(self, spec: GuideSpec) -> Guide:
        try:
            import llguidance
        except ImportError as error:
            raise InvalidArgument(
                f"{FIELD} needs the extra `guided` on the worker: {install_command('guided')}"
            ) from error
        tokenizer, trial = self._load_tokenizer()
        if spec.kind == "structural_tag":
            try:
                form, text = "lark", structural_grammar(json.loads(spec.text), self._markers)
            except (ValueError, RecursionError) as error:
                raise GrammarRefused(f"cannot be compiled: {error}", kind="invalid") from error
        else:
            form, text = spec.kind, spec.text
        # What compiled in the child cannot come here, but what ended the child never gets here: so compile twice.
        grammar = trial.run(form, text, (spec.whitespace or WHITESPACE) if spec.kind == "json" else None)
        # Quiet: complaints are the caller's, not this process's stderr.
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarRefused(f"cannot be compiled: {matcher.get_error()}", kind="invalid")
        return Guide(matcher, vocab_size=self._model.vocab_size, own_eos=tokenizer.eos_tokens, kind=spec.kind)

    def _load_tokenizer(self) -> tuple[LLTokenizer, GrammarTrial]:
        import llguidance

        if self._tokenizer is None or self._trial is None:
            path = self._model.directory / "tokenizer.json"
            try:
                text = path.read_text(encoding="utf-8")
                added = json.loads(text).get("added_tokens") or []
                entries = [(str(entry["content"]), int(entry["id"])) for entry in added]
                highest = max((token for _, token in entries), default=0)
                # A tokenizer may know more than the model and less: the mask is cut or filled to the model's size.
                size = max(self._model.vocab_size, highest + 1)
                trial = GrammarTrial(text, n_vocab=size, eos=self._model.eos, cpu_seconds=self._model.compile_seconds)
                trial.start()  # it reads the same file meanwhile
                tokenizer = llguidance.LLTokenizer(text, n_vocab=size, eos_token=self._model.eos or None)
            except OSError as error:
                raise InvalidArgument(f"{FIELD} needs {path.name} in the model's directory on the worker") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgument(f"{FIELD}: the model's {path.name} cannot be used: {error}") from error
            self._markers = {text: token for text, token in entries if tokenizer.is_special_token(token)}
            self._tokenizer, self._trial = tokenizer, trial
        return self._tokenizer, self._trial

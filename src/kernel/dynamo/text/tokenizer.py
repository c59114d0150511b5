"""Tokenizers: one Protocol, a model's `tokenizer.json`, and bytes for a model that has none.

`encode` is text -> ids and nothing more: the tokenizer's post-processor does not run, so no bos is added (a chat
template writes the specials it needs as text, and special-token strings in the text become their ids).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from tokenizers import Tokenizer as HfTokenizer
from tokenizers.processors import TemplateProcessing

from dynamo.errors import InvalidArgument
from dynamo.protocol.openai.shapes import JsonObject
from dynamo.text.pieces import MAX_ID, PieceTable, table_for, vocabulary_size
from dynamo.text.quick_encoder import OWN_ENCODER, QuickEncoder, TokenizerChoice

logger = logging.getLogger(__name__)

TextInput: TypeAlias = str | tuple[str, str]
"""A text, or two that are judged together."""


class Tokenizer(Protocol):
    """Text <-> token ids. Safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def is_quick(self) -> bool:
        """Whether a token costs a tenth of a microsecond to encode, not one."""
        ...

    @property
    def bos_token(self) -> str | None: ...

    @property
    def eos_token(self) -> str | None: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special token that is not written in it. The caller has stripped NULs."""
        ...

    def encode_unlocked(self, text: str) -> list[int]:
        """Return the same ids as `encode`, without holding the interpreter lock: run this method in an executor."""
        ...

    def encode_inputs(
        self, inputs: Sequence[TextInput], *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the ids of texts that are to be embedded, with the special tokens that encoders get around them.

        A pair of texts becomes one input. `most_tokens` cuts the end of the (second) text, not the special tokens. Runs
        outside the interpreter lock.
        """
        ...

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, visible: frozenset[int] = frozenset()
    ) -> str:
        """Return the text of `ids` as a whole. Ids outside the vocabulary add nothing.

        `visible`: special tokens that are shown although special tokens are skipped.
        """
        ...

    def token_id(self, text: str) -> int | None:
        """Return the id of exactly this token, or None."""
        ...

    def token_name(self, token_id: int) -> str:
        """Return a token as the vocabulary has it (`Ġthe`), which need not be the text that it adds."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token in a log-probability listing: specials by name, partial code points as U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token adds behind other text."""
        ...

    def pieces(self, *, skip_special_tokens: bool, visible: frozenset[int] = frozenset()) -> PieceTable | None:
        """Return the per-token table for streaming, shared by all streams; None when the decoder depends on neighbours.

        `visible` is as in `decode`, and one of few sets: a table is kept for each.
        """
        ...

    def special_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens that these texts hold. The texts are one of few tuples: the answers are kept."""
        ...


class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer that encodes many independent texts in one call."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; outside the interpreter lock, on several cores where there are any."""
        ...


class JsonTokenizer:
    """A HuggingFace fast tokenizer (`tokenizer.json`)."""

    __slots__ = ("_bos", "_eos", "_found", "_quick", "_size", "_special", "_tables", "hf")

    def __init__(self, hf: HfTokenizer, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        hf.no_truncation()  # training-time settings of some files: they would silently cut or pad a prompt
        hf.no_padding()
        self.hf = hf
        self._size = vocabulary_size(hf)
        self._bos, self._eos = bos_token, eos_token
        self._special = frozenset(number for number, token in hf.get_added_tokens_decoder().items() if token.special)
        self._tables: dict[frozenset[int], PieceTable | None] = {}  # by the tokens that are hidden
        self._found: dict[tuple[str, ...], frozenset[int]] = {}
        self._quick: QuickEncoder | None = None

    def choose(self, choice: TokenizerChoice, path: Path) -> None:
        """Encode by `choice`; `path` is the file that this tokenizer was read from.

        Raises InvalidArgument where the encoder cannot be had and the choice lets no other one stand in.
        """
        if choice.backend == "default":
            return
        added = [*self.hf.get_added_tokens_decoder().values()]
        hf = self.hf  # not a method of this object: the two would hold each other until the collector comes
        quick = QuickEncoder(path, lambda text: _encoded(hf, (text,))[0], added, choice.aside)
        if choice.backend == "fastokens":
            try:
                quick.load()
            except InvalidArgument as error:
                if not choice.may_fall_back:
                    raise
                logger.warning("prompts are encoded by the model's own tokenizer: %s", error)
                return
        self._quick = quick

    @property
    def is_quick(self) -> bool:
        return self._quick is not None and self._quick.is_quick

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def bos_token(self) -> str | None:
        return self._bos

    @property
    def eos_token(self) -> str | None:
        return self._eos

    def encode(self, text: str) -> list[int]:
        return _encoded(self.hf, (text,))[0] if self._quick is None else self._quick.encode(text)

    encode_unlocked = encode

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if self._quick is None or not self._quick.warm(sum(map(len, texts))):
            return _encoded(self.hf, texts)
        return list(map(self._quick.encode, texts))

    def encode_inputs(
        self, inputs: Sequence[TextInput], *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[list[int]]:
        clean = [_clean(text) if isinstance(text, str) else (_clean(text[0]), _clean(text[1])) for text in inputs]
        encodings = self.hf.encode_batch_fast(clean, add_special_tokens=add_special_tokens)
        found = [encoding.ids for encoding in encodings]
        if most_tokens is not None:
            for place, ids in enumerate(found):
                if len(ids) > most_tokens:
                    found[place] = self._cut(clean[place], add_special_tokens, most_tokens)
        return found

    def _cut(self, text: TextInput, add_special_tokens: bool, most_tokens: int) -> list[int]:
        first, second = (text, None) if isinstance(text, str) else text
        head = self.hf.encode(first, add_special_tokens=False)
        pair = None if second is None else self.hf.encode(second, add_special_tokens=False)
        room = most_tokens
        if add_special_tokens:
            room = max(0, room - self.hf.num_special_tokens_to_add(pair is not None))
        if pair is not None:
            pair.truncate(max(0, room - len(head.ids)))
        head.truncate(room)
        whole: list[int] = self.hf.post_process(head, pair, add_special_tokens).ids
        return whole[:most_tokens]

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, visible: frozenset[int] = frozenset()
    ) -> str:
        known = [i for i in ids if 0 <= i <= MAX_ID]
        if skip_special_tokens and visible:
            hidden = self._special - visible
            known, skip_special_tokens = [i for i in known if i not in hidden], False
        return str(self.hf.decode(known, skip_special_tokens=skip_special_tokens))

    def token_id(self, text: str) -> int | None:
        found: int | None = self.hf.token_to_id(text)
        return found

    def token_name(self, token_id: int) -> str:
        return self.hf.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        table = self.pieces(skip_special_tokens=False)
        if table is None:
            return self.decode([token_id], skip_special_tokens=False)
        text = table[token_id]
        return text if text is not None else table.data(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        table = self.pieces(skip_special_tokens=False)
        return self.decode([token_id], skip_special_tokens=False).encode() if table is None else table.data(token_id)

    def pieces(self, *, skip_special_tokens: bool, visible: frozenset[int] = frozenset()) -> PieceTable | None:
        hidden = self._special - visible if skip_special_tokens else frozenset()
        if hidden not in self._tables:
            self._tables[hidden] = table_for(self.hf, hidden)
        return self._tables[hidden]

    def special_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        found = self._found.get(texts)
        if found is None:
            names = ((number, self.hf.id_to_token(number)) for number in self._special)
            found = frozenset(number for number, name in names if name and any(name in text for text in texts))
            self._found[texts] = found
        return found


def _encoded(hf: HfTokenizer, texts: Sequence[str]) -> list[list[int]]:
    # The batch call computes no offsets, so it is also the cheaper one for a single text.
    try:
        encodings = hf.encode_batch_fast(list(texts), add_special_tokens=False)
    except TypeError:  # a lone surrogate is no Unicode text, but JSON can write one
        encodings = hf.encode_batch_fast(list(map(_clean, texts)), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


class ByteTokenizer:
    """Every byte of the UTF-8 text is one token: for engines that bring no tokenizer, known only by name.

    Decoding always shows something, because such engines often emit made-up ids:

    - 0..255 is that byte, and a valid UTF-8 sequence of them is its text;
    - except control bytes other than tab, newline and carriage return, which are shown as their Unicode control
      picture (1 -> "␁", 127 -> "␡"), so `decode(encode(text))` differs from `text` exactly there;
    - any other id is shown as "⟨id⟩".

    It has no bos, no eos and no special tokens.
    """

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = PieceTable(_byte_piece, size=256)

    vocab_size: Final = 256
    is_quick: Final = True
    bos_token: Final = None
    eos_token: Final = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    encode_unlocked = encode

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_inputs(
        self, inputs: Sequence[TextInput], *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[list[int]]:
        return [self.encode(text if isinstance(text, str) else "".join(text))[:most_tokens] for text in inputs]

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, visible: frozenset[int] = frozenset()
    ) -> str:
        return b"".join(map(_byte_piece, ids)).decode(errors="replace")

    def token_id(self, text: str) -> int | None:
        data = text.encode(errors="replace")
        return data[0] if len(data) == 1 else None

    def token_text(self, token_id: int) -> str:
        return _byte_piece(token_id).decode(errors="replace")

    token_name = token_text

    def token_bytes(self, token_id: int) -> bytes:
        return _byte_piece(token_id)

    def pieces(self, *, skip_special_tokens: bool, visible: frozenset[int] = frozenset()) -> PieceTable | None:
        return self._table

    def special_ids_in(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset()


def _clean(text: str) -> str:
    """Return a text that the tokenizer takes, with a question mark for a lone surrogate."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _byte_piece(token_id: int) -> bytes:
    if not 0 <= token_id < 256:
        return f"⟨{token_id}⟩".encode()
    if token_id == 0x7F:
        return "␡".encode()
    if token_id < 0x20 and token_id not in b"\t\n\r":
        return chr(0x2400 + token_id).encode()
    return bytes([token_id])


def load_tokenizer(directory: Path, choice: TokenizerChoice = OWN_ENCODER) -> JsonTokenizer:
    """Return the tokenizer of a model directory.

    Raises:
        InvalidArgument: there is no readable `tokenizer.json`, or the chosen encoder must be had and cannot; the message
            names what to do about it.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise InvalidArgument(
            f"no tokenizer.json in {directory}: only fast tokenizers are supported. Convert the model's tokenizer once "
            'with transformers (`AutoTokenizer.from_pretrained(path).save_pretrained(path)`), or send tokens in "prompt"'
        )
    try:
        hf = HfTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise InvalidArgument(f"{path} is not a tokenizer this version can read: {error}") from error
    names = special_tokens(directory)
    _add_configured(hf, read_json_object(Path(directory) / "tokenizer_config.json"), names)
    tokenizer = JsonTokenizer(hf, bos_token=names.get("bos_token"), eos_token=names.get("eos_token"))
    tokenizer.choose(choice, path)
    return tokenizer


# The classes of transformers that read `add_bos_token` and `add_eos_token`, without their suffixes.
_ADDING_CLASSES: Final = frozenset({"Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX"})


def _add_configured(hf: HfTokenizer, config: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Let the tokenizer add the tokens that its configuration demands, where its own post-processor adds none."""
    family = str(config.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    if family not in _ADDING_CLASSES or hf.num_special_tokens_to_add(False):
        return
    bos, eos = (
        [(name, hf.token_to_id(name))]
        if config.get(f"add_{role}") is True and (name := names.get(role, "")) and hf.token_to_id(name) is not None
        else []
        for role in ("bos_token", "eos_token")
    )
    if bos or eos:
        before, behind = ([name for name, _ in tokens] for tokens in (bos, eos))
        hf.post_processor = TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *behind, *(f"{name}:1" for name in before), "$B:1", *(f"{name}:1" for name in behind)],
            special_tokens=[*bos, *eos],
        )


def special_tokens(directory: Path) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, `pad_token`, ... by name, from the tokenizer's configuration files."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the later file wins
        for name, value in read_json_object(Path(directory) / file).items():
            if not name.endswith("_token"):
                continue
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found


def read_json_object(path: Path) -> JsonObject:
    """Return the object in a model's JSON file; empty when the file is absent.

    Raises:
        InvalidArgument: the file is there but is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value

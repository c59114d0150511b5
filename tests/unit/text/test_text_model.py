from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing

from dynamo.errors import InvalidArgument
from dynamo.text import ByteTokenizer, CachedTokenizer, JsonTokenizer, load_text_model, load_tokenizer

USER = [{"role": "user", "content": "hi"}]
NO_TOOLS_AND_ONE: tuple[list[dict[str, Any]] | None, ...] = (None, [{}])


@pytest.fixture
def directory(tmp_path: Path, tiny_model: ModuleType) -> Path:
    path: Path = tiny_model.write_tiny_model(tmp_path / "model")
    return path


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.is_file() else {}
    value.update(changes)
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


def test_a_model_directory_has_everything(directory: Path) -> None:
    model = load_text_model(directory)
    assert (model.eos_token_ids, model.context_length, model.has_chat_template) == ((1,), 2048, True)
    prompt = model.template.render(USER)
    assert prompt == "<s><|user|>hi</s><|assistant|>"
    ids = model.tokenizer.encode(prompt)
    assert (ids[0], ids[-2]) == (0, 1)  # special tokens in the text are their ids, and no bos is added
    assert ids.count(0) == 1
    assert (model.tokenizer.bos_token, model.tokenizer.eos_token) == ("<s>", "</s>")
    assert model.tokenizer.decode(ids) == "hi"
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_no_directory_is_bytes_and_the_plain_template() -> None:
    model = load_text_model(None)
    assert isinstance(model.tokenizer, ByteTokenizer)
    assert model.template.render(USER) == "user: hi\nassistant: "
    assert (model.eos_token_ids, model.context_length, model.has_chat_template) == ((), None, False)


def test_a_model_without_a_template_gets_the_plain_one_and_says_so(tmp_path: Path, tiny_model: ModuleType) -> None:
    model = load_text_model(tiny_model.write_tiny_model(tmp_path / "m", chat_template=None))
    assert not model.has_chat_template
    assert model.template.render(USER) == "user: hi\nassistant: "


@pytest.mark.parametrize("as_file", [False, True])
def test_a_custom_template_wins(directory: Path, as_file: bool) -> None:
    (directory / "mine.jinja").write_text("mine{{ eos_token }}")
    custom = directory / "mine.jinja" if as_file else "mine{{ eos_token }}"
    assert load_text_model(directory, custom_template=custom).template.render(USER) == "mine</s>"
    assert load_text_model(None, custom_template="own").template.render(USER) == "own"


def test_template_files_in_their_order(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", chat_template=[{"name": "default", "template": "listed"}])
    assert load_text_model(directory).template.render(USER) == "listed"
    edit(directory / "chat_template.json", chat_template="json")
    assert load_text_model(directory).template.render(USER) == "json"
    (directory / "chat_template.jinja").write_text("file {{ pad_token }}")
    assert load_text_model(directory).template.render(USER) == "file <pad>"
    extra = directory / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools {{ strftime_now('%Y') }}")
    model = load_text_model(directory, now=lambda: datetime(2031, 1, 1))
    assert model.template.render(USER) == "file <pad>"
    assert model.template.render(USER, tools=[{"type": "function"}]) == "tools 2031"
    model = load_text_model(directory, custom_template="mine")  # which is for every request
    assert [model.template.render(USER, tools=tools) for tools in NO_TOOLS_AND_ONE] == ["mine", "mine"]
    model = load_text_model(directory, custom_template="mine", named_templates={"tool_use": "given"})
    assert [model.template.render(USER, tools=tools) for tools in NO_TOOLS_AND_ONE] == ["mine", "given"]


def test_named_templates_of_a_configuration_are_not_those_of_a_separate_file(directory: Path) -> None:
    named = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools"}]
    edit(directory / "tokenizer_config.json", chat_template=named)
    assert load_text_model(directory).template.render(USER, tools=[{}]) == "listed tools"
    (directory / "chat_template.jinja").write_text("file")
    assert load_text_model(directory).template.render(USER, tools=[{}]) == "file"


@pytest.mark.parametrize("value", [7, [{"name": "x"}], [1], {"default": 3}])
def test_a_malformed_template_member_is_named(directory: Path, value: Any) -> None:
    edit(directory / "tokenizer_config.json", chat_template=value)
    with pytest.raises(InvalidArgument, match="chat_template must be"):
        load_text_model(directory)


@pytest.mark.parametrize(
    ("generation", "config", "eos_token", "expected"),
    [
        ([2, 5], 7, "</s>", (2, 5, 1)),
        (..., 7, "</s>", (7, 1)),
        (..., [7, 8], ..., (7, 8)),
        (..., ..., {"content": "<pad>", "special": True}, (2,)),
        (None, None, None, ()),
        (1, 1, "</s>", (1,)),
    ],
)
def test_end_tokens_come_from_configs_and_tokenizer(
    directory: Path, generation: Any, config: Any, eos_token: Any, expected: tuple[int, ...]
) -> None:
    edit(directory / "generation_config.json", eos_token_id=generation)
    edit(directory / "config.json", eos_token_id=config)
    edit(directory / "tokenizer_config.json", eos_token=eos_token)
    assert load_text_model(directory).eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "model_max_length", "expected"),
    [
        ({"max_position_embeddings": 64}, 32, 64),
        ({"max_position_embeddings": ..., "text_config": {"max_position_embeddings": 99}}, 32, 99),
        ({"max_position_embeddings": ..., "n_positions": 12}, 32, 12),
        ({"max_position_embeddings": ...}, 32, 32),
        ({"max_position_embeddings": ...}, 10**30, None),
        ({"max_position_embeddings": ...}, ..., None),
    ],
)
def test_context_length(directory: Path, config: dict[str, Any], model_max_length: Any, expected: int | None) -> None:
    edit(directory / "config.json", **config)
    edit(directory / "tokenizer_config.json", model_max_length=model_max_length)
    assert load_text_model(directory).context_length == expected


@pytest.mark.parametrize(
    ("config", "own", "added"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, None, [0]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}, None, [0, 1]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, ByteLevel(), [0]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, None, []),
        ({"tokenizer_class": "LlamaTokenizerFast"}, None, []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<none>"}, None, []),
        ({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, None, []),  # which does not read it
        (
            {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": True},
            TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
            [0],
        ),
    ],
)
def test_tokens_of_the_configuration_are_added_where_the_tokenizer_adds_none(
    directory: Path, config: dict[str, Any], own: Any, added: list[int]
) -> None:
    edit(directory / "tokenizer_config.json", **config)
    hf = HfTokenizer.from_file(str(directory / "tokenizer.json"))
    if own is not None:
        hf.post_processor = own
        hf.save(str(directory / "tokenizer.json"))
    model = load_text_model(directory)
    bare = model.tokenizer.encode("hello")
    framed = [*added[:1], *bare, *added[1:]]
    assert (model.text_frame.around(bare), model.tokenizer.encode_inputs(["hello"])) == (framed, [framed])
    assert model.tokenizer.encode_inputs(["hello"], add_special_tokens=False) == [bare]
    assert model.tokenizer.encode_inputs(["hello"], most_tokens=len(framed) - 1) == [
        [*added[:1], *bare[:-1], *added[1:]]
    ]
    if own is None:
        assert model.tokenizer.encode_inputs([("hello", "hello")]) == [framed * 2]


def test_a_cache_is_put_in_front_when_asked_for(directory: Path) -> None:
    model = load_text_model(directory, tokenizer_cache_bytes=1 << 20)
    assert isinstance(model.tokenizer, CachedTokenizer)
    text = "the quick brown fox " * 200
    assert model.tokenizer.encode(text) == load_tokenizer(directory).encode(text)


def test_what_is_missing_or_broken_is_named(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        load_text_model(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (directory / "generation_config.json").write_text("[1]")
    with pytest.raises(InvalidArgument, match=r"generation_config\.json must hold a JSON object"):
        load_text_model(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"config\.json is not valid JSON"):
        load_text_model(directory)
    (directory / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(directory)


def test_encoding_adds_nothing_cuts_nothing_and_pads_nothing(hf_copy: Callable[[str], HfTokenizer]) -> None:
    hf = hf_copy("llama3")  # its post-processor would put <|begin|> first
    hf.enable_truncation(4)
    hf.enable_padding(length=50)
    tokenizer = JsonTokenizer(hf)
    text = "the streaming worker answer and more tokens"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode_unlocked(text) == tokenizer.encode_many([text])[0] == ids


def test_a_lone_surrogate_is_replaced_instead_of_failing(hf: Callable[[str], HfTokenizer]) -> None:
    tokenizer = JsonTokenizer(hf("llama3"))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert ByteTokenizer().encode("a\ud800b") == list(b"a?b")


def test_one_token_by_name_text_and_bytes(hf: Callable[[str], HfTokenizer]) -> None:
    tokenizer = JsonTokenizer(hf("llama3"))
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    assert (tokenizer.token_text(end), tokenizer.token_bytes(end)) == ("<|end|>", b"<|end|>")
    half = tokenizer.hf.token_to_id("â")  # the byte-level letter of 0xE2
    assert half is not None
    assert (tokenizer.token_text(half), tokenizer.token_bytes(half)) == ("\ufffd", b"\xe2")
    assert tokenizer.token_id("no such token") is None
    word = JsonTokenizer(hf("suffix-bpe"))
    first = word.encode("the")[0]
    assert (word.token_text(first), word.token_bytes(first)) == (word.decode([first]), word.decode([first]).encode())
    metaspace = JsonTokenizer(hf("unigram"))
    space = next(i for i in range(metaspace.vocab_size) if (metaspace.hf.id_to_token(i) or "").startswith("▁t"))
    assert metaspace.token_text(space).startswith(" t")


def test_bytes_show_something_for_every_id() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([1, 2, 3]) == "␁␂␃"
    assert tokenizer.decode([65, 9, 10, 13, 127, 300, -1]) == "A\t\n\r␡⟨300⟩⟨-1⟩"
    assert all(tokenizer.decode([i]) for i in range(-2, 400))
    text = "héllo\n世界 👩‍🚀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.bos_token, tokenizer.eos_token) == (256, None, None)
    assert (tokenizer.token_id("a"), tokenizer.token_id("é"), tokenizer.token_id("")) == (97, None, None)
    assert (tokenizer.token_text(300), tokenizer.token_bytes(0xC3)) == ("⟨300⟩", b"\xc3")

"""Between the contract and llama.cpp, without llama.cpp: files, constraints, requests and recorded events."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from dynamo.contract.requests.generation import (
    GenerationLimits,
    GenerationRequest,
    read_generation,
)
from dynamo.errors import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.llamacpp.arguments import choose_engine, read_arguments
from dynamo.llamacpp.engine import LlamaAnswer, LlamaCppEngine, LlamaCppTextEngine, completion_body
from dynamo.llamacpp.gguf_header import is_gguf, read_gguf_header
from dynamo.llamacpp.slots import LlamaRefusal, map_llama_error
from dynamo.protocol.model_types import ModelInput
from support.cases import each_case
from support.demo_model import FILES

LIMITS = GenerationLimits("llama.cpp", context_length=100, vocab_size=50)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def write_head(path: Path, *entries: bytes, version: int = 3) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + b"".join(entries))
    return path


WORDS = entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
SCORES = entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 2) + bytes(8))
KIND = entry("general.architecture", 8, text("qwen3"))
LENGTH = entry("qwen3.context_length", 4, struct.pack("<I", 2048))


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_head_of_a_file_is_read_past_its_lists(tmp_path: Path) -> None:
    name = entry("general.name", 8, text("Demo"))
    template = entry("tokenizer.chat_template", 8, text("{{ messages }}"))
    path = write_head(tmp_path / "m.gguf", KIND, WORDS, SCORES, LENGTH, name, template)
    head = read_gguf_header(path)
    assert (head.architecture, head.name, head.context_length) == ("qwen3", "Demo", 2048)
    assert (head.has_chat_template, head.parts, head.part) == (True, 1, 0)
    assert is_gguf(path)
    assert not is_gguf(tmp_path / "missing")


@each_case(
    "content, named",
    [
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "ends within"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 10**9), "entries of metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 77, b""), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 8, struct.pack("<Q", 2**60)), "text of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture"),
    ],
)
def test_a_broken_file_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"m\.gguf.*{named}"):
        read_gguf_header(tmp_path / "m.gguf")


def tensor(name: str, kind: int, offset: int, *dimensions: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def test_a_file_that_is_shorter_than_its_header_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    infos = tensor("a", 0, 0, 4, 2) + tensor("b", 12, 32, 256, 3)  # 32 bytes of floats, then 3 blocks of Q4_K
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + KIND + LENGTH + infos
    start = -(-len(head) // 32) * 32
    whole = head.ljust(start, b"\0") + bytes(32 + 3 * 144)
    path.write_bytes(whole)
    assert read_gguf_header(path).architecture == "qwen3"
    for size in (len(whole) - 1, start + 32, start, len(head)):
        path.write_bytes(whole[:size])
        with pytest.raises(
            InvalidArgument, match=rf"m\.gguf.* has {size} bytes, and its header describes {len(whole)};"
        ):
            read_gguf_header(path)
    path.write_bytes(whole[: len(head) - 1])
    with pytest.raises(InvalidArgument, match="ends within"):
        read_gguf_header(path)


def test_of_an_unknown_type_only_the_place_of_a_tensor_counts(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + KIND + tensor("a", 999, 64, 1024)
    start = -(-len(head) // 32) * 32
    path = tmp_path / "m.gguf"
    path.write_bytes(head.ljust(start + 64, b"\0"))
    assert read_gguf_header(path).architecture == "qwen3"
    path.write_bytes(head.ljust(start + 63, b"\0"))
    with pytest.raises(InvalidArgument, match="download or copy it again"):
        read_gguf_header(path)


def test_the_engine_takes_tokens_where_the_tokenizer_is_and_else_text(tmp_path: Path) -> None:
    file = str(write_head(tmp_path / "m.gguf", KIND, LENGTH))
    assert choose_engine(["--model", file]) is LlamaCppTextEngine
    assert choose_engine(["--model", file, "--tokenizer", str(FILES)]) is LlamaCppEngine
    (tmp_path / "tokenizer.json").write_text("{}")
    assert choose_engine(["--model", file]) is LlamaCppEngine


def test_a_command_line_becomes_parameters_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.llamacpp.arguments.check_installed", lambda: None)
    file = str(write_head(tmp_path / "m.gguf", KIND, LENGTH))
    argv = ["--model", file, "--tokenizer", str(FILES), "--slots", "3", "--set", "rope_freq_scale=0.5"]
    arguments, worker = read_arguments([*argv, "--set", "cache_type_k=q8_0"])
    settings = arguments.settings
    assert (settings["n_ctx"], settings["n_parallel"], settings["rope_freq_scale"]) == (3 * 2048, 3, 0.5)
    assert settings["cache_type_k"] == "q8_0"
    assert (arguments.served_name, worker.model_name) == ("m", str(FILES))


def test_a_file_names_the_model_and_its_own_name_is_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.llamacpp.arguments.check_installed", lambda: None)
    name = entry("general.name", 8, text("Smol LM"))
    file = str(write_head(tmp_path / "Smol-135M.Q4_1.gguf", KIND, LENGTH, name))
    arguments, _ = read_arguments(["--model", file], model_input=ModelInput.Text)
    assert (arguments.served_name, arguments.aliases) == ("Smol-135M.Q4_1", ("Smol LM",))
    arguments, _ = read_arguments(["--model", file, "--served-model-name", "mine"], model_input=ModelInput.Text)
    assert (arguments.served_name, arguments.aliases) == ("mine", ())


def test_a_file_without_a_template_is_not_served_for_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.llamacpp.arguments.check_installed", lambda: None)
    template = entry("tokenizer.chat_template", 8, text("{{ messages }}"))
    for entries, expected in (([KIND], "completions"), ([KIND, template], "chat,completions")):
        file = str(write_head(tmp_path / "m.gguf", *entries))
        assert read_arguments(["--model", file], model_input=ModelInput.Text)[1].endpoint_types == expected
    argv = ["--model", str(write_head(tmp_path / "m.gguf", KIND)), "--endpoint-types", "chat"]
    assert read_arguments(argv, model_input=ModelInput.Text)[1].endpoint_types == "chat"


def test_a_worker_of_embeddings_pools_as_the_file_says_or_by_the_last_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo.llamacpp.arguments.check_installed", lambda: None)
    own_pooling = entry("qwen3.pooling_type", 4, struct.pack("<I", 1))
    for entries, expected in (([KIND, LENGTH], 3), ([KIND, LENGTH, own_pooling], None)):
        file = str(write_head(tmp_path / "m.gguf", *entries))
        arguments, worker = read_arguments(["--model", file, "--tokenizer", str(FILES), "--embedding-worker"])
        settings = arguments.settings
        assert (settings["embedding"], settings.get("pooling_type")) == (True, expected)
        assert settings["n_ubatch"] == settings["n_batch"] == 2048  # of one input, which is computed at once
        assert worker.endpoint_types == "embedding"
    with pytest.raises(InvalidArgument, match="--embedding-worker: give the directory"):
        read_arguments(["--model", file, "--embedding-worker"], model_input=ModelInput.Text)


@each_case(
    "argv, named",
    [
        (["--model", "missing.gguf"], "there is no file missing.gguf"),
        (["--model", "m.gguf"], "no tokenizer.json beside"),
        (["--model", "m.gguf", "--tokenizer", "."], "--tokenizer"),
        (["--model", "m.gguf", "--disaggregation-mode", "prefill"], "--disaggregation-mode"),
        (["--model", "second.gguf"], "part 2 of 2"),
    ],
)
def test_a_command_line_that_cannot_be_served_is_refused(
    argv: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path / "m.gguf", KIND)
    parts = entry("split.count", 2, struct.pack("<H", 2)), entry("split.no", 2, struct.pack("<H", 1))
    write_head(tmp_path / "second.gguf", KIND, *parts)
    with pytest.raises(InvalidArgument, match=named):
        read_arguments(argv)


def test_a_missing_package_is_one_sentence_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    file = str(write_head(tmp_path / "m.gguf", KIND))
    with pytest.raises(InvalidArgument, match=r"pip install .*xllamacpp"):
        read_arguments(["--model", file, "--tokenizer", str(FILES)])


# -- requests and events ----------------------------------------------------------------------------------------------


def asked(**members: Any) -> GenerationRequest:
    return read_generation({"token_ids": [1, 2, 3], **members}, LIMITS)


def test_every_option_of_a_request_is_set() -> None:
    request = asked(
        sampling_options={"temperature": 0.5, "seed": -1, "repetition_penalty": 1.1},
        stop_conditions={"max_tokens": 7, "ignore_eos": True},
        output_options={"logprobs": 0},
        extra_args={"sampling_options": {"logit_bias": {"4": -2}}},
    )
    body = completion_body(request, "g", 100)
    expected = {
        "prompt": [1, 2, 3], "n_predict": 7, "ignore_eos": True, "temperature": 0.5, "seed": 2**32 - 1, "n_probs": 1,
        "repeat_penalty": 1.1, "repeat_last_n": 100, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "grammar": "g",
        "logit_bias": [[4, -2.0]],
    }  # fmt: skip
    assert {name: body[name] for name in expected} == expected


async def test_a_second_cache_salt_ends_the_use_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.llamacpp.arguments.check_installed", lambda: None)
    arguments, _ = read_arguments(
        ["--model", str(write_head(tmp_path / "m.gguf", KIND, LENGTH)), "--tokenizer", str(FILES)]
    )
    engine, raw = LlamaCppEngine(arguments), LlamaCppTextEngine(arguments)
    for salt, uses in (("a", True), ("a", True), ("b", False), ("a", False)):
        body = await engine._body(asked(routing={"cache_salt": salt}), LIMITS)
        assert body["cache_prompt"] is uses
        _, sent = raw._call({"prompt": "x", "cache_salt": salt, "cache_prompt": True})
        assert (sent["cache_prompt"], "cache_salt" in sent) == (uses, False)


def probability(token: int, value: float) -> dict[str, Any]:
    other = {"id": 9, "token": "9", "bytes": [57], "logprob": -7.0}
    own = {"id": token, "token": "x", "bytes": [120], "logprob": value}
    return {**own, "top_logprobs": [own, other]}


def chunks(request: GenerationRequest, *events: dict[str, Any]) -> list[Any]:
    answer = LlamaAnswer(request)
    found = []
    for event in events:
        if (chunk := answer.chunk(event)) is not None:
            found.append(chunk)
        if answer.is_complete:
            break
    return found


def test_recorded_events_become_chunks() -> None:
    events = (
        {
            "index": 0,
            "content": "4",
            "tokens": [33],
            "stop": False,
            "completion_probabilities": [probability(33, -0.1)],
        },
        {"index": 0, "content": "", "tokens": [2], "stop": False, "completion_probabilities": [probability(2, -0.2)]},
        {"tokens": [], "stop": True, "stop_type": "eos", "truncated": False, "timings/cache_n": 2},
    )
    first, second, last = chunks(asked(output_options={"logprobs": 1}, eos_token_ids=[2]), *events)
    assert (first["token_ids"], first["log_probs"]) == ([33], [-0.1])
    assert first["top_logprobs"] == [[{"rank": 1, "token_id": 33, "logprob": -0.1}]]
    assert second["token_ids"] == [2]
    assert (last["token_ids"], last["finish_reason"]) == ([], "stop")
    assert last["completion_usage"]["completion_tokens"] == 2
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stop_token_that_llama_cpp_does_not_know_ends_the_answer() -> None:
    request = asked(stop_conditions={"stop_token_ids": [7]})
    events = [{"tokens": [token], "stop": False} for token in (5, 7, 8, 9)]
    found = chunks(request, *events)
    assert [chunk["token_ids"] for chunk in found] == [[5], [7], []]
    assert found[-1]["finish_reason"] == "stop"


def test_the_limit_is_told_from_a_stop() -> None:
    (_, last) = chunks(asked(), {"tokens": [5], "stop": False}, {"tokens": [], "stop": True, "stop_type": "limit"})
    assert last["finish_reason"] == "length"
    assert LlamaAnswer(asked()).cancelled()["finish_reason"] == "cancelled"


@each_case(
    "status, kind",
    [(400, InvalidArgument), (404, HttpError), (503, EngineShutdown), (500, Unknown)],
)
def test_errors_keep_their_meaning(status: int, kind: type[Exception]) -> None:
    found = map_llama_error(LlamaRefusal(status, "why"))
    assert type(found) is kind
    assert "why" in str(found)
    assert map_llama_error(ValueError("ours")) is None

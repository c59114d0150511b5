"""`dynamo serve MODEL` in an environment that has an engine: which one it takes, that it says so, answers and ends."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from support.demo_model import FILES
from support.engine_cluster import SUM
from support.gguf_model import write_gguf
from support.processes import Process

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LLAMA = os.environ.get("DYNAMO_LLAMACPP_PYTHON", "")
TRANSFORMERS = os.environ.get("DYNAMO_TRANSFORMERS_PYTHON", "")
needs_llama = pytest.mark.skipif(not LLAMA, reason="set DYNAMO_LLAMACPP_PYTHON (docs/engines.md)")
needs_transformers = pytest.mark.skipif(not TRANSFORMERS, reason="set DYNAMO_TRANSFORMERS_PYTHON (docs/engines.md)")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@contextmanager
def serving(python: str, root: Path, *argv: str) -> Iterator[tuple[Process, OpenAI, str]]:
    """The command, a client of it, and the model's name; the command has to end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(root)}
    command = [python, "-m", "dynamo.cli.main", "serve", *argv, "--port", "0"]
    process = Process("serve", command, environment, root / "serve.log")
    try:
        url = process.wait_log(r"(?s)Ready.*?(http://127\.0\.0\.1:\d+)")[1]
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield process, client, client.models.list().data[0].id
        process.terminate()
        assert process.exit_code() == 0, process.log
    finally:
        process.close()


def ask(client: OpenAI, model: str, text: str = SUM, **more: Any) -> Any:
    more = {"temperature": 0, **more}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **more)


@needs_llama
def test_a_gguf_file_is_served_by_its_own_template_where_that_is_asked_for(tmp_path: Path) -> None:
    file = write_gguf(FILES, tmp_path / "demo.gguf")
    with serving(LLAMA, tmp_path, str(file), "--engine", "llamacpp-text") as (_, client, model):
        assert model == "demo"
        answer = ask(client, model)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("42", "stop")
        assert answer.usage.completion_tokens == 3
        pieces = [event.choices[0].delta.content or "" for event in ask(client, model, stream=True) if event.choices]
        assert "".join(pieces) == "42"
        (call,) = ask(client, model, "What is the weather in Paris?", tools=[WEATHER]).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
        completion = client.completions.create(model=model, prompt="What", max_tokens=3, temperature=0)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 3
        with pytest.raises(BadRequestError):
            ask(client, model, max_tokens=5, extra_body={"grammar": "root ::= (("})


@needs_llama
def test_two_gguf_files_take_turns_under_a_budget_of_one(tmp_path: Path) -> None:
    files = [str(write_gguf(FILES, tmp_path / f"{name}.gguf")) for name in ("one", "two")]
    with serving(LLAMA, tmp_path, *files, "--memory", "200MB") as (process, client, _):
        for model in ("one", "two", "one"):
            assert ask(client, model).choices[0].message.content == "42"
        assert re.findall(r"models: (\w+) is being (\w+)", process.log) == [
            ("one", "loaded"), ("one", "unloaded"), ("two", "loaded"), ("two", "unloaded"), ("one", "loaded"),
        ]  # fmt: skip
        assert all(int(taken) <= 210 for taken in re.findall(r"and takes (\d+) MB", process.log))


@needs_llama
def test_a_gguf_file_alone_is_served_in_tokens(tmp_path: Path) -> None:
    file = write_gguf(FILES, tmp_path / "demo.gguf")
    with serving(LLAMA, tmp_path, str(file)) as (process, client, model):
        assert "engine llamacpp: a GGUF file alone, whose own tokenizer and template are used" in process.log
        assert ask(client, model).choices[0].message.content == "42"


@needs_llama
def test_a_gguf_file_with_its_tokenizer_is_served_in_tokens(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(FILES / name, directory)
    write_gguf(FILES, directory / "demo.gguf")
    with serving(LLAMA, tmp_path, str(directory)) as (process, client, model):
        assert "engine llamacpp: a GGUF file, with the model's tokenizer beside it" in process.log
        assert ask(client, model).choices[0].message.content == "42"


@needs_transformers
def test_a_directory_goes_to_transformers_where_that_is_installed(tmp_path: Path) -> None:
    with serving(TRANSFORMERS, tmp_path, str(FILES)) as (process, client, model):
        assert "engine transformers: transformers is installed and knows Qwen3ForCausalLM" in process.log
        assert ask(client, model).choices[0].message.content == "42"

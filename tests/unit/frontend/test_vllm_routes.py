"""`/tokenize`, `/detokenize`, `/version` and `/ping`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import dynamo
from dynamo.frontend.admission.process import Stage
from dynamo.protocol.model_types import ModelInput, ModelType
from dynamo.protocol.records import ModelRuntimeConfig
from support.access import bearer, closed_cluster, key
from support.asgi_client import Exchange
from support.frontend_cluster import Cluster, cluster
from support.tiny_model import tiny_tokenizer, write_tiny_model

UNARY = {"endpoint": "tokenize", "request_type": "unary"}
CHAT = [{"role": "user", "content": "How are you?"}]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


async def ask(house: Cluster, path: str, **body: Any) -> Exchange:
    return await house.client.call("POST", path, body)


async def test_a_chat_has_the_tokens_that_a_worker_gets(house: Cluster, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model")
    worker = await house.worker(directory=directory, runtime_config=ModelRuntimeConfig(context_length=900))
    assert (await house.client.chat(messages=CHAT)).status == 200
    found = await ask(house, "/tokenize", model="m", messages=CHAT, temperature=0.5)
    ids = worker.requests[0]["token_ids"]
    assert found.json == {"count": len(ids), "max_model_len": 900, "tokens": ids, "token_strs": None}
    longer = await ask(house, "/tokenize", messages=CHAT, add_generation_prompt=False)
    assert longer.json["count"] < len(ids)
    assert len(worker.requests) == 1
    assert house.metric("dynamo_frontend_requests_total", model="m", **UNARY, status="success") == 2


async def test_a_prompt_has_the_tokens_of_its_completion_and_comes_back(house: Cluster, tmp_path: Path) -> None:
    await house.worker(directory=write_tiny_model(tmp_path / "model"))
    found = (await ask(house, "/tokenize", prompt="How are you?", return_token_strs=True)).json
    tokenizer = tiny_tokenizer()
    assert found["tokens"] == tokenizer.encode("How are you?").ids
    assert found["token_strs"] == [tokenizer.id_to_token(number) for number in found["tokens"]]
    back = await ask(house, "/detokenize", model="m", tokens=found["tokens"])
    assert back.json == {"prompt": tokenizer.decode(found["tokens"], skip_special_tokens=False)}


async def test_special_tokens_are_added_to_a_prompt_unless_declined_and_to_a_chat_if_requested(
    house: Cluster, tmp_path: Path
) -> None:
    directory = write_tiny_model(tmp_path / "model", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(path)
    await house.worker(directory=directory)

    async def tokens(**body: Any) -> list[int]:
        found: list[int] = (await ask(house, "/tokenize", **body)).json["tokens"]
        return found

    bare = tokenizer.encode("How are you?", add_special_tokens=False).ids
    assert await tokens(prompt="How are you?") == [0, *bare]
    assert await tokens(prompt="How are you?", add_special_tokens=False) == bare
    assert await tokens(messages=CHAT) == bare
    assert await tokens(messages=CHAT, add_special_tokens=True) == [0, *bare]
    assert await tokens(prompt="") == [0]
    assert (await ask(house, "/detokenize", tokens=[0, *bare])).json == {"prompt": "<s>How are you?"}
    assert (await ask(house, "/detokenize", tokens=[])).json == {"prompt": ""}


async def test_what_is_wrong_is_named(house: Cluster, tmp_path: Path) -> None:
    await house.worker(directory=write_tiny_model(tmp_path / "model"))
    size = tiny_tokenizer().get_vocab_size()
    for path, body, status, param in (
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, 400, "promt"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, 422, "chat_template"),
        ("/tokenize", {"model": "n", "prompt": "a"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1, size]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "text": "x"}, 400, "text"),
    ):
        refused = await ask(house, path, **body)
        assert (refused.status, refused.json["error"]["param"]) == (status, param), (path, body, refused.body)


async def test_the_model_may_be_left_out_where_there_is_one(house: Cluster) -> None:
    none = await ask(house, "/tokenize", prompt="a")
    assert (none.status, none.json["error"]["code"]) == (404, "model_not_found")
    await house.worker()
    assert (await ask(house, "/tokenize", prompt="a")).json["tokens"] == [97]
    await house.worker(model="vectors", component="two", model_type=ModelType.Embedding)
    several = await ask(house, "/detokenize", tokens=[97])
    assert several.json["error"]["message"] == "Model not found: none is named; served here: 'm', 'vectors'"
    assert (await ask(house, "/tokenize", model="vectors", prompt="a")).status == 200


async def test_a_model_that_takes_text_is_refused_by_name(house: Cluster) -> None:
    await house.worker(model="plain", model_input=ModelInput.Text)
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": CHAT}),
        ("/detokenize", {"tokens": [1]}),
    ):
        refused = await ask(house, path, **body)
        assert (refused.status, refused.json["error"]["param"]) == (422, "model")
        assert "'plain'" in refused.json["error"]["message"]


async def test_a_long_text_is_tokenized_whole(house: Cluster) -> None:
    await house.worker()
    text = "ab" * 100_000
    found = (await ask(house, "/tokenize", prompt=text)).json
    assert found["count"] == len(text)
    assert (await ask(house, "/detokenize", tokens=found["tokens"])).json == {"prompt": text}


async def test_a_key_sees_its_own_models_only_and_ping_and_version_need_none(tmp_path: Path) -> None:
    async with closed_cluster(
        tmp_path, key("good"), key("other", models=["other-*"]), key("files", routes=["files"])
    ) as it:
        await it.worker()

        async def status(id: str, **body: Any) -> int:
            answer = await it.client.call("POST", "/tokenize", {"prompt": "a", **body}, headers=bearer(id))
            assert answer.status is not None
            return answer.status

        assert [await status("good"), await status("other"), await status("other", model="m")] == [200, 404, 404]
        assert await status("files") == 403
        assert (await it.client.call("POST", "/tokenize", {"prompt": "a"})).status == 401
        assert (await it.client.get("/version")).json == {"version": dynamo.__version__}
        for method in ("GET", "POST"):
            answer = await it.client.call(method, "/ping")
            assert (answer.status, answer.body) == (200, b"")
        it.frontend.admission.move(Stage.DRAINING)
        assert (await it.client.get("/ping")).status == 503

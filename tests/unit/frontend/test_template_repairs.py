"""What the frontend does for templates that refuse or lose what was sent: the same on every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from support.frontend_cluster import Cluster, cluster, say
from support.tiny_model import tiny_tokenizer, write_tiny_model

REFUSED: Final = "{{ raise_exception('order') }}"
SHOWN: Final = "{{ m.role }}: {{ m.content }}; "


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            + REFUSED
            + "{% endif %}"
            + SHOWN
            + "{% endfor %}",
            "system: abe; user: c; assistant: d; user: f;",
        ),
        (
            "{% for m in messages if m.role != 'developer' %}" + SHOWN + "{% endfor %}",
            "system: ab; user: c; assistant: d; system: e; user: f;",
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}" + REFUSED + "{% endif %}" + SHOWN + "{% endfor %}",
            "user: abec; assistant: d; user: f;",
        ),
    ],
)
async def test_texts_of_the_system_reach_the_model_on_every_api(
    house: Cluster, tmp_path: Path, template: str, prompt: str
) -> None:
    worker = await house.worker(say([1]), directory=write_tiny_model(tmp_path / "model", chat_template=template))
    turns = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    rest = [*turns, {"role": "system", "content": "e"}, {"role": "user", "content": "f"}]
    leading = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    renamed = [{**one, "role": "developer"} if one["content"] == "e" else one for one in rest]
    for path, fields in (
        ("/v1/chat/completions", {"messages": [*leading, *rest]}),
        ("/v1/chat/completions", {"messages": [*leading, *renamed]}),
        ("/v1/responses", {"instructions": "a", "input": [*leading[1:], *renamed]}),
        ("/v1/messages", {"system": "a", "messages": [{"role": "system", "content": "b"}, *rest], "max_tokens": 4}),
    ):
        answer = await house.client.call("POST", path, {"model": "m", **fields})
        assert answer.status == 200, (path, answer.body)
    prompts = {"".join(tiny_tokenizer().decode(one["token_ids"]).split()) for one in worker.requests}
    # Responses and Messages send the system's texts at the beginning as one.
    assert {one.replace(";system:b", "b") for one in prompts} == {prompt.replace(" ", "")}


async def test_a_template_that_reads_only_parts_shows_texts_on_every_api(house: Cluster, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"
    worker = await house.worker(say([1]), directory=write_tiny_model(tmp_path / "model", chat_template=template))
    parts = {kind: [{"type": kind, "text": "b"}, {"type": kind, "text": "c"}] for kind in ("text", "input_text")}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "d"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": [*turns, {"role": "user", "content": parts["text"]}]}),
        ("/v1/responses", {"input": [*turns, {"role": "user", "content": parts["input_text"]}]}),
        ("/v1/messages", {"messages": [*turns, {"role": "user", "content": parts["text"]}], "max_tokens": 4}),
    ):
        answer = await house.client.call("POST", path, {"model": "m", **fields})
        assert answer.status == 200, (path, answer.body)
    prompts = {tiny_tokenizer().decode(one["token_ids"]) for one in worker.requests}
    assert prompts == {"user:a;assistant:d;user:bc;"}


async def test_an_effort_becomes_one_that_the_family_knows_on_every_api(house: Cluster, tmp_path: Path) -> None:
    template = "{{ 'Reasoning: ' + reasoning_effort }}"
    worker = await house.worker(say([1]), directory=write_tiny_model(tmp_path / "model", chat_template=template))
    user = {"role": "user", "content": "a"}
    for path, fields in (
        ("/v1/chat/completions", {"messages": [user], "reasoning_effort": "xhigh"}),
        ("/v1/chat/completions", {"messages": [user], "chat_template_kwargs": {"reasoning_effort": "max"}}),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "xhigh"}}),
        ("/v1/messages", {"messages": [user], "output_config": {"effort": "max"}, "max_tokens": 4}),
    ):
        answer = await house.client.call("POST", path, {"model": "m", **fields})
        assert answer.status == 200, (path, answer.body)
    assert {tiny_tokenizer().decode(one["token_ids"]) for one in worker.requests} == {"Reasoning: high"}

"""The demonstration model is asked about drawings: over every API, and with the work in three roles.

A frontend and workers of the reference engine as processes; the drawings are those of `python -m dynamo.reference.demo.draw`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anthropic
import pytest
from openai import OpenAI

from dynamo.reference.demo.draw import main
from support.demo_model import FILES
from support.patience import PATIENCE_SECONDS
from support.pictures import data_url, image_part
from support.processes import Cluster, Frontend, wait

MODEL: Final = "demo"
ASKED: Final = (  # what is drawn, what is asked, what has to be answered
    (("--dots", "3"), "How many dots are in the picture?", "3"),
    (("--dots", "3"), "What colour are the dots?", "red"),
    (("--shape", "square", "--colour", "blue"), "Is this a circle or a square?", "square"),
    (("--shape", "triangle", "--colour", "green"), "What colour is the triangle?", "green"),
    (("--digit", "7", "--colour", "black"), "Which digit is this?", "7"),
)
ENCODED: Final = 'dynamo_frontend_encoder_requests_total{{outcome="success"}} {}'


def drawn(directory: Path, *flags: str) -> bytes:
    """The picture that the command writes."""
    path = directory / "drawn.png"
    main([*flags, str(path)])
    return path.read_bytes()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as found:
        yield found


def serve(cluster: Cluster, **roles: tuple[str, ...]) -> Frontend:
    """Start one worker of each role, with these flags, and a frontend."""
    workers = [
        cluster.reference(role, MODEL, FILES, "--disaggregation-mode", role, "--component", role, *flags)
        for role, flags in roles.items()
    ]
    frontend = cluster.frontend("frontend")
    for worker in workers:
        worker.wait_ready()
    frontend.wait_ready()
    wait(lambda: len(frontend.roles(MODEL)) == len(roles), lambda: f"{set(roles)}; log:\n{frontend.log}")
    wait(lambda: MODEL in frontend.models(), lambda: f"{MODEL} to be served; log:\n{frontend.log}")
    return frontend


def answer(frontend: Frontend, picture: bytes, text: str) -> str:
    """What the model says in a chat."""
    with OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
        content: Any = [image_part(data_url(picture)), {"type": "text", "text": text}]
        done = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
    assert done.choices[0].finish_reason == "stop"
    return str(done.choices[0].message.content)


def test_chats_responses_and_messages_are_answered_about_the_same_picture(cluster: Cluster, tmp_path: Path) -> None:
    frontend = serve(cluster, agg=())
    for flags, text, wanted in ASKED:
        assert answer(frontend, drawn(tmp_path, *flags), text) == wanted
    flags, text, wanted = ASKED[0]
    picture = drawn(tmp_path, *flags)
    with OpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as client:
        parts: Any = [{"type": "input_image", "image_url": data_url(picture), "detail": "auto"}, {"type": "input_text", "text": text}]  # fmt: skip
        response = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}])
        assert response.output_text == wanted
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    with anthropic.Anthropic(base_url=frontend.url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS) as messages:  # fmt: skip
        message = messages.messages.create(model=MODEL, max_tokens=64, messages=[{"role": "user", "content": content}])
    assert [block.text for block in message.content if block.type == "text"] == [wanted]


def test_three_roles_say_what_one_worker_says(cluster: Cluster, tmp_path: Path) -> None:
    frontend = serve(cluster, encode=(), prefill=("--route-to-encoder",), decode=())
    for flags, text, wanted in ASKED:
        assert answer(frontend, drawn(tmp_path, *flags), text) == wanted
    _, metrics = frontend.get("/metrics")
    assert ENCODED.format(len(ASKED)) in metrics.decode()

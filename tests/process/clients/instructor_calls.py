"""instructor over chat and Messages, by schema and by tool. Run by `test_clients.py` with the address of a server."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL = sys.argv[1]


class Answer(BaseModel):
    """The result of a sum."""

    sum: int


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


def check(client: Any, expected: BaseModel) -> None:
    found = client.chat.completions.create(
        model="demo",
        max_tokens=200,
        max_retries=0,
        response_model=type(expected),
        messages=[{"role": "user", "content": "What is 27 + 15?"}],
    )
    assert found.model_dump() == expected.model_dump(), found  # it is of a class that instructor made


openai_client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
check(instructor.from_openai(openai_client, mode=instructor.Mode.JSON_SCHEMA), Answer(sum=42))
# The model takes the arguments of a tool from the question, and computes none of them.
check(instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS), Add(a=27, b=15))
anthropic_client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
check(instructor.from_anthropic(anthropic_client, mode=instructor.Mode.ANTHROPIC_TOOLS), Add(a=27, b=15))
print("instructor works")

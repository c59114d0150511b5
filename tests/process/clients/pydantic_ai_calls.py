"""pydantic-ai over chat, Responses and Messages. Run by `test_clients.py` with the address of a server as its argument."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]


class Answer(BaseModel):
    sum: int


async def check(model: Any) -> None:
    assert (await Agent(model).run("What is 27 + 15?")).output.strip() == "42"
    async with Agent(model).run_stream("Count from 3 to 9.") as streamed:
        assert (await streamed.get_output()).strip() == "3, 4, 5, 6, 7, 8, 9"
    asked: list[str] = []
    agent = Agent(model)

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        asked.append(city)
        return '{"temperature": 21}'

    told = (await agent.run("What is the weather in Paris?")).output
    assert (asked, told.strip()) == (["Paris"], "temperature: 21"), (asked, told)


async def structured(model: Any) -> None:
    found = await Agent(model, output_type=NativeOutput(Answer)).run("What is 27 + 15?")
    assert found.output == Answer(sum=42), found


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
    for model in (OpenAIChatModel("demo", provider=openai), OpenAIResponsesModel("demo", provider=openai)):
        await check(model)
        await structured(model)
    await check(AnthropicModel("demo", provider=anthropic))
    print("pydantic-ai works")


asyncio.run(main())

"""langchain-openai and langchain-anthropic. Run by `test_clients.py` with the address of a server as its argument."""

from __future__ import annotations

import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]


class Answer(BaseModel):
    sum: int


@tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return '{"temperature": 21}'


def text_of(message: Any) -> str:
    text = message.text
    return str(text() if callable(text) else text).strip()


def check(model: Any, structured: str) -> None:
    assert text_of(model.invoke("What is 27 + 15?")) == "42"
    whole: Any = None
    for chunk in model.stream("Count from 3 to 9."):
        whole = chunk if whole is None else whole + chunk
    assert text_of(whole) == "3, 4, 5, 6, 7, 8, 9", whole
    assert whole.usage_metadata["output_tokens"] > 0, whole
    question = HumanMessage("What is the weather in Paris?")
    with_tools = model.bind_tools([get_weather])
    called = with_tools.invoke([question])
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("get_weather", {"city": "Paris"})], called
    result = ToolMessage('{"temperature": 21}', tool_call_id=called.tool_calls[0]["id"])
    assert text_of(with_tools.invoke([question, called, result])) == "temperature: 21"
    streamed: Any = None
    for chunk in with_tools.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [call["args"] for call in streamed.tool_calls] == [{"city": "Paris"}], streamed
    assert model.with_structured_output(Answer, method=structured).invoke("What is 27 + 15?") == Answer(sum=42)


check(ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="demo", max_retries=0, stream_usage=True), "json_schema")
check(
    ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model="demo", max_retries=0, use_responses_api=True), "json_schema"
)
check(ChatAnthropic(base_url=URL, api_key="none", model="demo", max_retries=0, max_tokens=200), "json_schema")
thinker = ChatAnthropic(
    base_url=URL,
    api_key="none",
    model="demo",
    max_retries=0,
    max_tokens=2000,
    thinking={"type": "enabled", "budget_tokens": 1024},
)
assert [block["type"] for block in thinker.invoke("What is 27 + 15?").content] == ["thinking", "text"]
counted = ChatAnthropic(base_url=URL, api_key="none", model="demo").get_num_tokens_from_messages([HumanMessage("hi")])
assert counted > 0
print("langchain works")

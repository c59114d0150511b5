"""Ask a served model a question with the `openai` package, streamed.

    python examples/chat_client.py http://127.0.0.1:8000/v1 "Hello!"

Without a third argument it asks the first model that the server lists.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1", question: str = "Hello!", model: str = "") -> int:
    client = OpenAI(base_url=base_url, api_key="none")  # no key is checked, but the package wants one
    if not model:
        served = [one.id for one in client.models.list()]
        if not served:
            print("no model is served here yet", file=sys.stderr)
            return 1
        model = served[0]
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            print(event.choices[0].delta.content, end="", flush=True)
        if event.usage:
            print(f"\n[{model}: {event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

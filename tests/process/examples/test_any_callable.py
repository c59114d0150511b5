"""The example of a function as an engine, served by the command and asked by curl and the openai package."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from openai import OpenAI

from support.serve_command import serve_command

EXAMPLE = Path(__file__).parents[3] / "examples" / "any_callable.py"


def test_a_function_is_served_and_asked_by_curl_and_by_the_openai_client(tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    shutil.copy(EXAMPLE, tmp_path)
    with serve_command(
        tmp_path, "--engine", "any_callable:count_words", "--http-host", "127.0.0.1", "--http-port", "0"
    ) as command:
        command.wait_ready()
        assert "count_words" in command.printed_curl()
        body = json.dumps({"model": "count_words", "messages": [{"role": "user", "content": "to be or not"}]})
        done = subprocess.run(
            [curl, "-s", f"{command.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body],
            capture_output=True,
            timeout=30,
            check=True,
        )
        unary = json.loads(done.stdout)
        with OpenAI(base_url=f"{command.url}/v1", api_key="none") as client:
            stream = client.chat.completions.create(
                model="count_words",
                messages=[{"role": "user", "content": "to be or not"}],
                temperature=0.5,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(stream)
        command.process.send_signal(signal.SIGINT)
        status = command.wait_ended()
    expected = "1. to\n2. be\n3. or\n4. not\n4 words."
    assert unary["choices"][0]["message"]["content"] == expected
    assert unary["usage"] == {"prompt_tokens": 12, "completion_tokens": 33, "total_tokens": 45}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 33
    assert len(chunks) > 3  # a word at a time
    assert (status, command.err) == (0, command.err)

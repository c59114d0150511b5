"""llm-comply judges this server by the public documents of four APIs, which it carries."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest
from client_environments import python_of

from process.foreign.suites import interpreter, served_demo
from support.patience import PATIENCE_SECONDS

# What it finds that is no fault, by format and test: a pattern that each of the messages must match.
COMPACT: Final = r"HTTP 405"  # POST /v1/responses/compact is not served: the path is that of a response with this id
# Its document of Messages marks as required what Anthropic's own examples leave out: `citations`, `caller`, and these.
SPARE: Final = (
    r"content\.\d+: \{'type': '(text|tool_use|thinking)'|"
    r"(usage: )?'(cache_creation|inference_geo|output_tokens_details|server_tool_use|service_tier|stop_details|container)' "
    r"is a required property"
)
WAIVED: Final = {
    # It sends `reasoning`, which is a member of Responses: OpenAI's chat has `reasoning_effort`, and refuses what it does not know.
    "openai-chat": {"chat-reasoning-summary": r"HTTP 400|response\.\w+ is (missing|empty)"},
    "open-responses": {"compact-response": COMPACT, "compact-missing-model": COMPACT},
    "anthropic": {
        f"anth-{name}": SPARE
        for name in ("basic-response", "system-prompt", "multi-turn", "tool-calling", "image-input", "thinking-display")
    },
}
NAMED: Final = {"openai-chat": "gpt-5-demo", "open-responses": "gpt-5-demo", "anthropic": "claude-3.7-sonnet-demo"}
"""It leaves tests out for models of another name."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_demo(tmp_path_factory.mktemp("served"), names=("demo", *sorted(set(NAMED.values())))) as address:
        yield address


@pytest.mark.foreign
@pytest.mark.parametrize("form", WAIVED)
def test_each_finding_has_a_reason_why_it_is_no_fault(form: str, url: str) -> None:
    program = python_of("llm_comply").with_name("llm-comply")
    command = [str(interpreter("llm_comply")), str(program), "--format", form, "--base-url", f"{url}/v1", "--json"]
    command += ["--model", NAMED[form], "--api-key", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_SECONDS, check=False)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    failed = {each["id"]: each["errors"] for each in results if each["status"] == "failed"}
    waived = WAIVED[form]
    found = {
        name: errors
        for name, errors in failed.items()
        if name not in waived or not all(re.match(waived[name], error) for error in errors)
    }
    assert found == {}
    assert sum(each["status"] == "passed" for each in results) >= 3

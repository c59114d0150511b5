"""schemathesis over OpenAI's own document, which llm-comply carries: whatever it allows is answered, or refused in its form."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[dev]'")

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import response_schema_conformance  # noqa: E402

from process.foreign.suites import package, served_demo  # noqa: E402
from support.patience import PATIENCE_SECONDS  # noqa: E402

EXAMPLES: Final = 40
GOOD: Final[dict[str, dict[str, Any]]] = {
    "POST /chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "POST /completions": {"model": "demo", "prompt": "hi", "max_tokens": 4},
    "GET /models": {},
    "GET /models/{model}": {},
}
REFUSED: Final = (400, 404, 422)
NULLS: Final = (("CreateCompletionResponse", "system_fingerprint"),)
"""Members that are null here and left out there. Clients read both alike, and the native frontend sends null, too."""


@functools.cache
def operations() -> dict[str, Any]:
    """Return the operations that are served here, by their labels."""
    file = package("llm_comply", "llm_comply") / "specs" / "openai_chat.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    wanted = {label.partition(" ")[2] for label in GOOD}
    document["paths"] = {path: found for path, found in document["paths"].items() if path in wanted}
    for schema, member in NULLS:
        document["components"]["schemas"][schema]["properties"][member]["nullable"] = True
    read = schemathesis.openapi.from_dict(document)
    return {each.ok().label: each.ok() for each in read.get_all_operations() if each.ok().label in GOOD}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    operations()
    with served_demo(tmp_path_factory.mktemp("served")) as address:
        yield address


def within_reach(body: dict[str, Any], good: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a generated body that can be served: two of its members, and a good one's."""
    kept = {name: body[name] for name in sorted(body, key=lambda name: (len(name) * number) % 17)[:2]}
    return {**kept, **good}


@pytest.mark.foreign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", GOOD)
def test_what_the_document_allows_is_answered_by_its_schema_or_refused_in_its_form(label: str, url: str) -> None:
    statuses: Counter[int] = Counter()
    examples = EXAMPLES if label.startswith("POST") else 5

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operations()[label].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Any) -> None:
        number = statuses.total()
        if isinstance(case.body, dict):
            few = number % 3 > 0
            case.body = within_reach(case.body, GOOD[label], number) if few else {**case.body, "model": "demo"}
        elif "{model}" in label and number % 2:
            case.path_parameters["model"] = "demo"
        response = case.call(base_url=f"{url}/v1", timeout=PATIENCE_SECONDS)
        statuses[response.status_code] += 1
        if response.status_code in REFUSED:
            error = response.json()["error"]
            assert isinstance(error["message"], str), response.text
            assert {"type", "param", "code"} <= error.keys(), response.text
        else:
            assert response.status_code == 200, (response.status_code, response.text)
            if "text/event-stream" not in response.headers["content-type"][0]:
                case.validate_response(response, checks=[response_schema_conformance])

    check()
    assert statuses[200] > 0, statuses
    print(f"{label}: {dict(statuses)}")

"""Write the matrix of engines and features of docs/engines.md from the engines themselves: `make docs`.

Options of a request are tried: a small request with the option goes through the functions by which the engine reads one, and
what those refuse is a 400. What is not an option is read from the hooks that the engine's class defines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pages import write_page

from dynamo.contract.engine import LLMEngine
from dynamo.contract.requests.generation import Feature, GenerationLimits, GenerationRequest, read_generation
from dynamo.contract.requests.output_grammar import grammar_of
from dynamo.errors import InvalidArgument
from dynamo.llamacpp import engine as llamacpp
from dynamo.reference.engine import ReferenceEngine
from dynamo.reference.lora import Adapter
from dynamo.reference.request import Limits, read_request
from dynamo.sglang import engine as sglang
from dynamo.transformers import engine as transformers
from dynamo.trtllm import engine as trtllm
from dynamo.vllm.engine import VllmEngine
from dynamo.vllm.requests import VllmLimits, constraint_of, read_sampling

PAGE: Final = Path(__file__).parent.parent / "docs" / "engines.md"
CONTEXT_TOKENS: Final = 4096
VOCABULARY: Final = 1000

_TABLE: Final = re.compile(r"(<!-- table: features -->\n)(?:\|.*\n)*")

Request = dict[str, Any]
Read = Callable[[Request], object]


class Engine(NamedTuple):
    """One column of the matrix."""

    name: str
    kind: type[LLMEngine]
    read: Read


def shared(name: str, unsupported: frozenset[Feature], constrain: Callable[[GenerationRequest], object]) -> Read:
    """Return how an engine over `read_generation` reads a request; `constrain` makes what it is guided by."""
    limits = GenerationLimits(name, CONTEXT_TOKENS, VOCABULARY, unsupported)

    def read(request: Request) -> object:
        asked = read_generation(request, limits)
        return None if asked.constraint is None else constrain(asked)

    return read


def _grammar(asked: GenerationRequest) -> str:
    assert asked.constraint is not None
    return grammar_of(asked.constraint)


def _guided(asked: GenerationRequest) -> object:
    assert asked.constraint is not None
    return trtllm.guided_parameters(asked.constraint)


def _read_vllm(request: Request) -> object:
    return read_sampling(request, VllmLimits(CONTEXT_TOKENS, VOCABULARY)), constraint_of(request)


def _read_reference(request: Request) -> object:
    known: Mapping[str, Adapter] = {"one": Adapter("one", Path(), 1, ())}
    return read_request(request, Limits(VOCABULARY, CONTEXT_TOKENS, (0,)), adapters=known)


ENGINES: Final = (
    Engine("vLLM", VllmEngine, _read_vllm),
    Engine("SGLang", sglang.SglangEngine, shared("SGLang", sglang.UNSUPPORTED, sglang.sampling_parameters)),
    Engine("TensorRT-LLM", trtllm.TrtllmEngine, shared("TensorRT-LLM", trtllm.UNSUPPORTED, _guided)),
    Engine("llama.cpp", llamacpp.LlamaCppEngine, shared("llama.cpp", llamacpp.UNSUPPORTED, _grammar)),
    Engine(
        "transformers",
        transformers.TransformersEngine,
        shared("transformers", transformers.UNSUPPORTED, _grammar),
    ),
    Engine("reference", ReferenceEngine, _read_reference),
)


def _group(name: str, **members: object) -> Request:
    return {name: members}


def _more(**members: object) -> Request:
    return {"extra_args": {"sampling_options": members}}


def _guide(**members: object) -> Request:
    return _group("sampling_options", guided_decoding=members)


REQUESTS: Final[Mapping[str, Request]] = {
    "`temperature`": _group("sampling_options", temperature=0.5),
    "`top_p`": _group("sampling_options", top_p=0.5),
    "`top_k`": _group("sampling_options", top_k=5),
    "`min_p`": _group("sampling_options", min_p=0.1),
    "`presence_penalty`, `frequency_penalty`": _group("sampling_options", presence_penalty=1.0, frequency_penalty=1.0),
    "`repetition_penalty`": _group("sampling_options", repetition_penalty=1.1),
    "`seed`": _group("sampling_options", seed=1),
    "`n` in one request of the engine (else the frontend sends one for each)": _group("sampling_options", n=2),
    "`use_beam_search`": _group("sampling_options", use_beam_search=True),
    "`logit_bias`": _more(logit_bias={"1": 1.0}),
    "`allowed_token_ids`": _more(allowed_token_ids=[1, 2]),
    "`bad_words_token_ids`": _more(bad_words_token_ids=[[1, 2]]),
    "`min_tokens`": _group("stop_conditions", min_tokens=2),
    "`ignore_eos`": _group("stop_conditions", ignore_eos=True),
    "`stop_token_ids`": _group("stop_conditions", stop_token_ids=[7]),
    "`max_thinking_tokens`": _group("stop_conditions", max_thinking_tokens=5),
    "log probabilities with alternatives": _group("output_options", logprobs=3),
    "`prompt_logprobs`": _group("output_options", prompt_logprobs=1),
    "guided by a JSON schema": _guide(json={"type": "object"}),
    "guided by a regex": _guide(regex="a+"),
    "guided by a choice": _guide(choice=["a", "b"]),
    "guided by a grammar": _guide(grammar='start: "a"'),
    "guided by a structural tag": _guide(structural_tag={"type": "structural_tag", "format": {"type": "any_text"}}),
    "a LoRA adapter (`routing.lora_name`)": _group("routing", lora_name="one"),
    "a cache salt": _group("routing", cache_salt="a"),
    "images, audio, video": {"multi_modal_data": {"image": [{"Url": "data:,"}]}},
    "embeddings in place of tokens": {"prompt_embeds": "AAAA"},
    "a prompt that a prefill worker computed": {"prefill_result": {"disaggregated_params": {"kv_transfer_params": {}}}},
}
"""What is tried, as the part of a request that wants it."""

HOOKS: Final[Mapping[str, str]] = {
    "vectors of texts": "embed",
    "KV events": "kv_event_sources",
    "load reports": "component_metrics_dp_ranks",
    "its own metrics": "register_prometheus",
    "`abort` of its own ([how others end](cancellation.md#engine-by-engine))": "abort",
}


def accepts(engine: Engine, request: Request) -> bool:
    """Return whether the engine reads a request. Raises what it raises, but for a refusal."""
    try:
        engine.read({"token_ids": [1, 2, 3], **request})
    except InvalidArgument:
        return False
    return True


def operations(engine: Engine) -> frozenset[str] | None:
    """Return the names of the engine's controls and updates; None where only an engine that has started declares them."""
    declared = engine.kind.__new__(engine.kind)
    try:
        found = frozenset({*declared.supported_controls(), *declared.supported_updates()})
    except AttributeError:  # they read what `start` sets
        return None
    is_own = engine.kind.supported_controls is not LLMEngine.supported_controls
    return None if is_own and not found else found


def table() -> str:
    """Return the rows of the matrix, with its head."""
    names = [engine.name for engine in ENGINES]
    lines = [["Feature", *names], ["---", *("---" for _ in names)]]
    for label, request in REQUESTS.items():
        lines.append([label, *("yes" if accepts(engine, request) else "400" for engine in ENGINES)])
    for label, hook in HOOKS.items():
        has = (getattr(engine.kind, hook) is not getattr(LLMEngine, hook) for engine in ENGINES)
        lines.append([label, *("yes" if one else "" for one in has)])
    declared = {engine.name: operations(engine) for engine in ENGINES}
    lines += [
        [f"control `{operation}`", *(_declares(declared[name], operation) for name in names)]
        for operation in sorted({each for found in declared.values() for each in found or ()})
    ]
    return "".join(_line(cells) for cells in lines)


def _declares(declared: frozenset[str] | None, operation: str) -> str:
    if declared is None:
        return "see its section"
    return "yes" if operation in declared else ""


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def written(page: str) -> str:
    """Return the page with its matrix as the engines have it. Raises ValueError when it has no place."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError("the page has no place for the matrix: <!-- table: features -->")
    return _TABLE.sub(lambda match: match[1] + table(), page)


if __name__ == "__main__":
    sys.exit(write_page(PAGE, written))

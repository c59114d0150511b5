"""What reading the output costs for one token of a stream without calls, by format: the CPU clock, no socket.

    python benchmarks/parsing.py [--rounds N]

A stream is 64 tokens of prose, one at each wake-up, through the parsing stage with its counter of reasoning tokens; making
the parsers is part of it. The figure is the least of all rounds, in microseconds per token. The bar is 1.5.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import SimpleNamespace
from typing import Any, Final

from dynamo.frontend.pipeline.events import ChoiceOutput, ParsingStage
from dynamo.frontend.pipeline.parsing import OutputPlan, plan_output
from dynamo.frontend.pipeline.plan import Plan, Tally
from dynamo.protocol.openai.body import BodyLimits
from dynamo.protocol.openai.chat_options import chat_options
from dynamo.protocol.openai.requests import decode_chat
from dynamo.protocol.records import ModelRuntimeConfig
from dynamo.protocol.worker_request import PlannedRequest, StopFields
from dynamo.reference.demo import DIRECTORY
from dynamo.text.formats import TOOL_FORMATS
from dynamo.text.model import load_text_model
from dynamo.text.output import Content

BAR_US: Final = 1.5
STREAMS: Final = 50  # in one round
REQUEST: Final = b"""{"model": "m", "messages": [{"role": "user", "content": "Hello"}], "tools": [{"type": "function",
 "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]}"""
PROSE: Final = "The weather in Paris is sunny today, so we can go to the garden and read a book. " * 8
REASONING: Final = (("", "qwen3"), ("hermes", "qwen3"), ("deepseek_v3_2", "deepseek_r1"), ("harmony", "gpt_oss"))


def main() -> int:
    """Measure, print, and tell by the status whether the bar was met everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="of each format (default: %(default)s)")
    rounds = parser.parse_args().rounds
    tokenizer = load_text_model(DIRECTORY).tokenizer
    ids = list(tokenizer.encode(PROSE))[:64]
    outputs = [ChoiceOutput(0, (Content(tokenizer.decode([one])),), [one]) for one in ids]
    options = chat_options(decode_chat(REQUEST, ignore_unsupported=False, limits=BodyLimits()))
    is_met = True
    for tools, reasoning in [(name, "") for name in sorted(TOOL_FORMATS)] + list(REASONING):
        config = ModelRuntimeConfig(tool_call_parser=tools or None, reasoning_parser=reasoning or None)
        plan = plan_output(options, config, prompt="", tokenizer=tokenizer, prompt_ids=ids)
        assert plan is not None
        least = min(_round(plan, outputs, tokenizer) for _ in range(rounds))
        is_met = is_met and least <= BAR_US
        name = " + ".join(filter(None, (tools, reasoning)))
        print(f"{name:32} {least:6.2f} us/token{'' if least <= BAR_US else '   over the bar of 1.5'}")
    return 0 if is_met else 1


def _round(plan: OutputPlan, outputs: list[ChoiceOutput], tokenizer: Any) -> float:
    work: Any = SimpleNamespace(tally=Tally(0), plan=Plan(PlannedRequest(StopFields()), [[]]))
    began = time.process_time()
    for _ in range(STREAMS):
        stage = ParsingStage(plan, work, tokenizer)
        for output in outputs:
            stage.outputs([output])
    return (time.process_time() - began) * 1e6 / (STREAMS * len(outputs))


if __name__ == "__main__":
    sys.exit(main())

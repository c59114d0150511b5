"""The small model that is served when none is named: its files are in `model/`; `tools/demo_model` made them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

__all__ = ["DIRECTORY", "NAME", "choose"]

DIRECTORY: Final = Path(__file__).parent / "model"
NAME: Final = "demo"  # the name that clients use
TOOL_CALL_PARSER: Final = "hermes"
REASONING_PARSER: Final = "qwen3"


def choose(args: argparse.Namespace) -> None:
    """Serve this model: fill in what its worker's command line leaves open."""
    args.model = DIRECTORY
    args.served_model_name = args.served_model_name or NAME
    args.dyn_tool_call_parser = args.dyn_tool_call_parser or TOOL_CALL_PARSER
    args.dyn_reasoning_parser = args.dyn_reasoning_parser or REASONING_PARSER

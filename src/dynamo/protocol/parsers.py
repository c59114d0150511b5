"""The names under which a model card requests an output parser.

A worker advertises a name and a frontend applies the parser, and the two may be of different systems: every name of the
contract is understood, also where our own frontend has no such parser (then the output is text).
"""

from __future__ import annotations

from typing import Final

__all__ = ["BUILT_REASONING_PARSERS", "BUILT_TOOL_PARSERS", "REASONING_PARSERS", "TOOL_PARSERS"]

BUILT_TOOL_PARSERS: Final = (
    "deepseek_v3", "deepseek_v3_1", "default", "hermes", "jamba", "kimi_k2", "kimi_k25", "llama3_json", "mistral",
    "nemotron_deci", "phi4", "qwen25",
)  # fmt: skip
"""Tool-call parsers our frontend has (`dynamo.text.formats.tools`)."""

BUILT_REASONING_PARSERS: Final = (
    "basic", "deepseek-v4", "deepseek_r1", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4",
    "deepseek_v41", "deepseekv4", "glm45", "glm47", "kimi_k2", "kimi_k25", "minimax_m2", "nemotron3", "nemotron_deci",
    "nemotron_nano", "nemotron_v3", "qwen3", "qwen3_coder", "step3",
)  # fmt: skip
"""Reasoning parsers our frontend has (`dynamo.text.reasoning`)."""

TOOL_PARSERS: Final = (
    *BUILT_TOOL_PARSERS,
    "deepseek-v4", "deepseek_v3_2", "deepseek_v4", "deepseek_v41", "deepseekv4", "gemma-4", "gemma4", "glm45", "glm47",
    "harmony", "inkling", "kimi-k3", "kimi_k3", "minimax-m3", "minimax-m3-nom", "minimax_m2", "minimax_m3",
    "minimax_m3_nom", "muse", "muse_glimmer", "nemotron_nano", "pythonic", "qwen3", "qwen3_coder",
)  # fmt: skip
"""Every tool-call parser of the contract."""

REASONING_PARSERS: Final = (
    *BUILT_REASONING_PARSERS,
    "gemma-4", "gemma4", "gpt_oss", "granite", "inkling", "kimi", "kimi-k3", "kimi_k3", "minimax-m3",
    "minimax_append_think", "minimax_m3", "mistral", "muse", "muse_glimmer",
)  # fmt: skip
"""Every reasoning parser of the contract."""

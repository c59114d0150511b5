"""The names under which a model card requests an output parser.

A worker advertises a name and a frontend applies the parser. The worker knows the names alone, so that a mistyped one ends
its start.
"""

from __future__ import annotations

from typing import Final

TOOL_PARSERS: Final = (
    "apertus", "cohere_command3", "deepseek-v4", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4",
    "deepseek_v41", "deepseekv4", "default", "dots", "ernie45", "functiongemma", "gemma-4", "gemma4", "glm45", "glm47",
    "granite", "harmony", "hermes", "hunyuan_a13b", "inkling", "internlm", "jamba", "kimi-k3", "kimi_k2", "kimi_k25",
    "kimi_k3", "lfm2", "llama3_json", "llama4_pythonic", "longcat", "mimo", "minimax-m3", "minimax-m3-nom",
    "minimax_m2", "minimax_m3", "minimax_m3_nom", "mistral", "muse", "muse_glimmer", "nemotron_deci", "nemotron_nano",
    "olmo3", "phi4", "pythonic", "qwen25", "qwen3", "qwen3_coder", "seed_oss", "step3", "step3p5", "xlam",
)  # fmt: skip
"""Every tool-call parser (`dynamo.text.formats.tools`)."""

REASONING_PARSERS: Final = (
    "apertus", "basic", "cohere_command3", "deepseek-v4", "deepseek_r1", "deepseek_v3", "deepseek_v3_1",
    "deepseek_v3_2", "deepseek_v4", "deepseek_v41", "deepseekv4", "ernie45", "gemma-4", "gemma4", "glm45", "glm47",
    "gpt_oss", "granite", "hunyuan_a13b", "inkling", "kimi", "kimi-k3", "kimi_k2", "kimi_k25", "kimi_k3", "mimo",
    "minimax-m3", "minimax_append_think", "minimax_m2", "minimax_m3", "mistral", "muse", "muse_glimmer", "nemotron3",
    "nemotron_deci", "nemotron_nano", "nemotron_v3", "olmo3", "qwen3", "qwen3_coder", "seed_oss", "step3", "step3p5",
)  # fmt: skip
"""Every reasoning parser (`dynamo.text.formats.reasoning`)."""

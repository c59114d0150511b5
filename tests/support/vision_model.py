"""A small random model that sees: the files of a frontend and an engine, with a placeholder for each image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from support.tiny_model import write_tiny_model

__all__ = ["IMAGE_TOKEN", "vision_config", "write_vision_files"]

IMAGE_TOKEN: Final = 2  # `<pad>` of the tiny tokenizer

TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<pad>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vision_config(vocab_size: int) -> dict[str, Any]:
    """The members of config.json with which the reference engine sees."""
    grid = {"model_type": "colour_grid", "first_token_id": vocab_size - 64}
    return {"image_token_id": IMAGE_TOKEN, "vision_config": grid}


def write_vision_files(directory: Path, **config: Any) -> tuple[Path, Mapping[str, Any]]:
    """Write what a frontend reads; return the directory and its config.json. `config`: further members of that."""
    write_tiny_model(directory, chat_template=TEMPLATE)
    found = json.loads((directory / "config.json").read_text())
    found = {**found, **vision_config(found["vocab_size"]), **config}
    (directory / "config.json").write_text(json.dumps(found))
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ColourGridProcessor"}))
    return directory, found

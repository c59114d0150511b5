"""A model directory small enough for a test: real files, a few kilobytes, no network and no weights.

`python tests/support/tiny_model.py DIRECTORY` writes one by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS: Final = "<s>"
EOS: Final = "</s>"
PAD: Final = "<pad>"
CONTEXT_LENGTH: Final = 2048

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SENTENCES: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs, and count from 0 to 9: 0123456789.",
    "A token is not a word, and a word is not a token; the worker streams them all the same.",
    "def generate(request, context): yield {'token_ids': [1, 2, 3], 'index': 0}",
    "Größe, naïve café, привет мир, こんにちは世界, 你好，世界, and an emoji 👩‍🚀.",
)


def tiny_tokenizer(vocabulary_size: int = 512) -> Tokenizer:
    """A byte-level BPE tokenizer (every text round-trips) with `<s>` = 0, `</s>` = 1, `<pad>` = 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def write_tiny_model(
    directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, context_length: int = CONTEXT_LENGTH
) -> Path:
    """Write the files a frontend reads from a HuggingFace directory, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "model_max_length": context_length,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    files = {
        "tokenizer_config.json": tokenizer_config,
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "max_position_embeddings": context_length,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "vocab_size": tokenizer.get_vocab_size(),
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return directory


if __name__ == "__main__":
    print(write_tiny_model(Path(sys.argv[1])))

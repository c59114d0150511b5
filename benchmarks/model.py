"""The bench's model directory: a 32k-vocabulary byte-level BPE made here, so that nothing is downloaded."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 32_000
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(seed: int, count: int) -> list[str]:
    """Pronounceable words, the same for the same seed."""
    rng = random.Random(seed)
    onsets = ["b", "br", "c", "ch", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v"]
    vowels = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
    ends = ["", "n", "r", "s", "t", "l", "nd", "st"]
    return [
        "".join(rng.choice(onsets) + rng.choice(vowels) + rng.choice(ends) for _ in range(rng.randint(1, 3)))
        for _ in range(count)
    ]


def make_model(directory: Path) -> Path:
    """Write the model unless it is there already; returns the directory."""
    if (directory / "tokenizer.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = words(1, 120_000)
    tokenizer.train_from_iterator((" ".join(text[i : i + 50]) for i in range(0, len(text), 50)), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 65536}
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY, "eos_token_id": 2}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return directory


def prompt_text(directory: Path, tokens: int, seed: int) -> str:
    """Text of about `tokens` tokens."""
    return Prompts(directory).text(tokens, seed)


class Prompts:
    """Texts of a length in the model's tokens; the same seed, the same text."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(self, tokens: int, seed: int) -> list[int]:
        """Exactly so many. Cut from a longer text, so that tokenising the text again may differ at the cut."""
        text = " ".join(words(seed, tokens))
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids[:tokens])

    def text(self, tokens: int, seed: int) -> str:
        """Text of about `tokens` tokens."""
        return str(self.tokenizer.decode(self.ids(tokens, seed)))

    def pair(self, tokens: int, shared: int, seed: int) -> tuple[str, str]:
        """Two texts of `tokens` tokens that share their first `shared`."""
        first, other = self.ids(tokens, seed), self.ids(tokens - shared, seed + 1)
        return str(self.tokenizer.decode(first)), str(self.tokenizer.decode(first[:shared] + other))

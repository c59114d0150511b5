"""Writes a Qwen3 model of the Hugging Face layout as one GGUF file, as llama.cpp reads it: float32, with tokenizer and template.

Needs the package `gguf` (in the `dev` extra).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from dynamo.reference.tensor_files import read_tensors

__all__ = ["write_gguf"]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of tokens, as GGUF numbers them
PRE_TOKENIZER: Final = "llama-bpe"  # looks whole words up first, as the demonstration model does: it has no merges


def write_gguf(directory: Path, target: Path, *, name: str = "demo") -> Path:
    """Write the model of `directory` as `target` and return `target`."""
    import gguf

    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_name(name)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, directory)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for file in sorted(directory.glob("model*.safetensors")):  # not the vision, which is no part of the language model
        for tensor, values in read_tensors(file).items():
            found = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ValueError(f"GGUF has no name for {tensor}")
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer: Any, directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    added = {entry["id"]: entry for entry in tokenizer["added_tokens"]}
    vocabulary = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    size = max(*vocabulary, *added) + 1
    texts = [added[number]["content"] if number in added else vocabulary[number] for number in range(size)]
    kinds = [
        NORMAL if number not in added else CONTROL if added[number]["special"] else USER_DEFINED
        for number in range(size)
    ]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    numbers = {text: number for number, text in enumerate(texts)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or ["<|im_end|> <|im_end|>"])  # llama.cpp wants one: this one never applies
    writer.add_eos_token_id(numbers[settings["eos_token"]])
    writer.add_pad_token_id(numbers[settings["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())

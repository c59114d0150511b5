"""The architecture (Qwen3) once more in PyTorch, for training only: `dynamo.reference.model` has no gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamo.reference.config import ModelConfig

__all__ = ["Network"]


class Network(nn.Module):
    """Token ids (rows, positions) to hidden states; parameter names are those of a HuggingFace checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = _Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.04)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model(tokens)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(config.context_length)[:, None] * torch.cat((frequencies, frequencies))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        turn = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, turn)
        return self.norm(hidden)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rows, count, _ = hidden.shape
        queries = self.q_norm(self.q_proj(hidden).float().view(rows, count, self.heads, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(hidden).float().view(rows, count, self.kv_heads, self.head_dim)).transpose(1, 2)
        values = self.v_proj(hidden).float().view(rows, count, self.kv_heads, self.head_dim).transpose(1, 2)
        share = self.heads // self.kv_heads
        with torch.autocast("cpu", enabled=False):  # in bfloat16 its way back takes three times as long on a CPU
            mixed = F.scaled_dot_product_attention(
                _rotate(queries, turn),
                _rotate(keys, turn).repeat_interleave(share, 1),
                values.repeat_interleave(share, 1),
                is_causal=True,  # rows are padded on the right, so padding is never looked at
            )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, count, -1))


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

"""The architecture (Qwen3) once more in PyTorch, for training only: `dynamo.reference.model` has no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamo.reference.config import ModelConfig

__all__ = ["Network", "rotate"]


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
        self.norm = _Norm(config.hidden_size, config.norm_eps)
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
        self.input_layernorm = _Norm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm.bare(hidden), turn, self.input_layernorm.weight)
        return hidden + self.mlp(self.post_attention_layernorm.bare(hidden), self.post_attention_layernorm.weight)


class _Norm(nn.Module):
    """RMSNorm; PyTorch's takes twice as long on a CPU."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return self.bare(hidden) * self.weight

    def bare(self, hidden: Tensor) -> Tensor:
        """Return the norm without its weight, which is cheaper to put into the matrix behind it."""
        normed: Tensor = _Normed.apply(hidden, self._eps)
        return normed


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_()
        share = squares.div_(hidden.shape[-1]).add_(eps).rsqrt_()
        normed = hidden * share
        ctx.save_for_backward(normed, share)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        normed, share = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, normed).unsqueeze(-1).div_(normed.shape[-1])
        return torch.addcmul(gradient, normed, along, value=-1).mul_(share), None


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = _Norm(self.head_dim, config.norm_eps)
        self.k_norm = _Norm(self.head_dim, config.norm_eps)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
        """Return what the positions take from those before them; `scale` is the weight of the norm in front."""
        rows, count, _ = hidden.shape
        weights = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))  # one product, not three
        mixed = F.linear(hidden, weights * scale).view(rows, count, -1, self.head_dim).transpose(1, 2)
        queries, keys, values = mixed.split((self.heads, self.kv_heads, self.kv_heads), 1)
        share = self.heads // self.kv_heads
        seen = F.scaled_dot_product_attention(
            rotate(self.q_norm(queries), turn),
            rotate(self.k_norm(keys), turn).repeat_interleave(share, 1),
            values.repeat_interleave(share, 1),
            is_causal=True,  # rows are padded on the right, so padding is never looked at
        )
        return self.o_proj(seen.transpose(1, 2).reshape(rows, count, -1))


class _Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        """Return what the layer adds to each position; `scale` is the weight of the norm in front."""
        weights = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        gate, up = F.linear(hidden, weights * scale).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

"""Llama 3: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; no biases, an output of its own unless tied.

Source: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3; module names as in torchtitan, so that a plan written
for one fits the other. Differs from torchtitan: the rotary table is made where it is used and is not an input.
Left out: KV cache, dropout, attention masks other than causal.

[Note: rotary table]
Each attention makes its own cos and sin: no buffer that `.to(bfloat16)` could round or `to_empty` could blank, and no
module input that FSDP could cast. Angles are taken in float64, since fp32 angles of some thousand radians are off by
1e-4; the table is then rounded to fp32 (kept in float64 for a float64 model), and the rotation done in that dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.errors import ConfigError
from common.models.base import LanguageModel, ModelConfig, check_seq, embedding, freeze


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary frequencies to contexts longer than those of pre-training.

    Attributes:
        factor: slowly turning frequencies are divided by this.
        low: frequencies with fewer turns than this over `original_seq_len` are divided whole.
        high: frequencies with more turns than this are left alone; between the two, a linear mix.
        original_seq_len: context length of pre-training, in tokens.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Hyperparameters of a Llama.

    Attributes:
        n_kv_heads: heads of keys and values; divides `n_heads`.
        ffn_dim: hidden width of the feed-forward.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretching of those frequencies, or None.
        norm_eps: added to the mean square in RMSNorm.
    """

    n_kv_heads: int
    ffn_dim: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"model config: {self.n_heads} query heads do not divide over {self.n_kv_heads} key and value heads; "
                "change n_heads or n_kv_heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model config: rotary embedding turns pairs, so dim over n_heads must be even, found {self.head_dim}; "
                "change dim or n_heads"
            )


def rope_frequencies(config: LlamaConfig, device: torch.device | None = None) -> torch.Tensor:
    """Angle per position of each rotated pair, [head_dim / 2] in float64."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device)
    frequencies = config.rope_theta ** -(pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = frequencies * (scaling.original_seq_len / (2 * math.pi))
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rope_table(config: LlamaConfig, seq: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of the rotary angles, [2, seq, head_dim / 2]; see [Note: rotary table].

    Args:
        config: frequencies, head width.
        seq: number of positions.
        device: where to make it.
        dtype: dtype to round to.
    """
    positions = torch.arange(seq, dtype=torch.float64, device=device)
    angles = positions[:, None] * rope_frequencies(config, device)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn each pair of neighbouring features by its angle.

    Args:
        x: [batch, heads, seq, head_dim].
        table: cosines and sines, [2, seq, head_dim / 2]; its dtype is the dtype of the arithmetic.

    Returns:
        [batch, heads, seq, head_dim] in the dtype of `x`.
    """
    cos, sin = table.unbind()
    even, odd = x.to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, in fp32 or wider, and scale each feature."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., dim]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention in which `n_heads / n_kv_heads` query heads share one head of keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        config = self.config
        q, k, v = (
            proj(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)  # [batch, heads, seq, head_dim]
            for proj in (self.wq, self.wk, self.wv)
        )
        table = rope_table(config, x.shape[1], x.device, torch.promote_types(x.dtype, torch.float32))
        heads = F.scaled_dot_product_attention(
            rotate(q, table),
            rotate(k, table),
            v,
            is_causal=True,
            enable_gqa=config.n_kv_heads != config.n_heads,
        )
        out: torch.Tensor = self.wo(heads.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=config.bias)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(LanguageModel):
    """A Llama with `config`'s sizes."""

    RESIDUAL_OUTPUTS = ("attention.wo", "feed_forward.w2")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        freeze(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, vocab_size] of tokens [batch, seq].

        Raises:
            ConfigError: a sequence longer than `config.max_seq_len`.
        """
        check_seq(tokens.shape[1], self.config.max_seq_len)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


# llama-debug: dim 64 leaves a remainder on 3 ranks, ffn_dim 170 on 3 and on 4, so that uneven shards occur.
CONFIGS = {
    "llama-debug": LlamaConfig(
        vocab_size=256, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=170, max_seq_len=256
    ),
    "llama-tiny": LlamaConfig(
        vocab_size=256, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=688, max_seq_len=1024
    ),
    "llama-small": LlamaConfig(
        vocab_size=256, dim=512, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=1376, max_seq_len=2048
    ),
    "llama3-8b": LlamaConfig(
        vocab_size=128_256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, max_seq_len=8192
    ),
    "llama3-70b": LlamaConfig(
        vocab_size=128_256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, max_seq_len=8192
    ),
    # Published as 3.1 only, hence the longer context and its scaled frequencies.
    "llama3-405b": LlamaConfig(
        vocab_size=128_256,
        dim=16_384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        ffn_dim=53_248,
        max_seq_len=131_072,
        rope_scaling=RopeScaling(),
    ),
}

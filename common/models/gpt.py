"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases throughout, and a head that shares the embedding.

Source: GPT-2 ("Language Models are Unsupervised Multitask Learners") and GPT-3 (arXiv 2005.14165, table 2.1); module
names are those of the published GPT-2 weights. Differs: projections are `nn.Linear` and not transposed.
Left out: dropout, KV cache, GPT-3's sparse attention in every other block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.models.base import LanguageModel, ModelConfig, check_seq, embedding, freeze


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """Hyperparameters of a GPT.

    Attributes:
        ffn_dim: hidden width of the feed-forward; 4 * dim in the published models.
        norm_eps: added to the variance in LayerNorm.
    """

    ffn_dim: int
    tied: bool = True
    bias: bool = True
    norm_eps: float = 1e-5


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.c_proj = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [batch, heads, seq, head_dim]
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.c_proj(heads.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two projections with a GELU between them, in the tanh form that GPT-2 was trained with."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.ffn_dim, config.dim, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        out: torch.Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(LanguageModel):
    """A GPT with `config`'s sizes."""

    RESIDUAL_OUTPUTS = ("attn.c_proj", "mlp.c_proj")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = embedding(config.vocab_size, config.dim)
        self.wpe = embedding(config.max_seq_len, config.dim)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.wte.weight
        freeze(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, vocab_size] of tokens [batch, seq].

        Raises:
            ConfigError: a sequence longer than `config.max_seq_len`.
        """
        check_seq(tokens.shape[1], self.config.max_seq_len)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


def _published(dim: int, n_layers: int, n_heads: int, max_seq_len: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=50_257, dim=dim, n_layers=n_layers, n_heads=n_heads, max_seq_len=max_seq_len, ffn_dim=4 * dim
    )


def _bytes(dim: int, n_layers: int, n_heads: int, max_seq_len: int, ffn_dim: int, *, tied: bool = False) -> GPTConfig:
    return GPTConfig(
        vocab_size=256,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        max_seq_len=max_seq_len,
        ffn_dim=ffn_dim,
        tied=tied,
    )


# gpt-debug: dim 56 leaves a remainder on 3 ranks; 250 positions and ffn_dim 226 on 3 and on 4: uneven shards.
CONFIGS = {
    "gpt-debug": _bytes(56, 3, 7, 250, 226),
    "gpt-debug-tied": _bytes(56, 3, 7, 250, 226, tied=True),
    "gpt-tiny": _bytes(256, 6, 8, 1024, 1024),
    "gpt2": _published(768, 12, 12, 1024),
    "gpt2-medium": _published(1024, 24, 16, 1024),
    "gpt2-large": _published(1280, 36, 20, 1024),
    "gpt2-xl": _published(1600, 48, 25, 1024),
    "gpt3-6.7b": _published(4096, 32, 32, 2048),
    "gpt3-175b": _published(12_288, 96, 96, 2048),
}

"""Models as users bring them, by `module:function`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Bigram(nn.Module):
    """Predicts a byte from the one before it; three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 6)
        self.norm = nn.RMSNorm(6)
        self.head = nn.Linear(6, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return logits


def bigram() -> nn.Module:
    return Bigram()


def computes_while_building() -> nn.Module:
    """`bigram`, but its scale is computed from real numbers, which the meta device does not have."""
    model = Bigram()
    model.norm.weight.data.fill_(torch.linspace(0, 1, 3)[1].item())
    return model


def fails() -> nn.Module:
    raise KeyError("no such\nlayer")


def frozen() -> nn.Module:
    return Bigram().requires_grad_(False)


def with_scalar() -> nn.Module:
    model = Bigram()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def with_dropout() -> nn.Module:
    return nn.Sequential(Bigram(), nn.Dropout(0.1))


def with_dropout_inside() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 8), nn.GRU(8, 8, num_layers=2, dropout=0.1))


class Dropping(nn.Module):
    """`Bigram`, and functions that drop with probability `p`; the noise has a generator of its own."""

    def __init__(self, dropout: float = 0.0, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = Bigram()
        self.dropout, self.attention_dropout = dropout, attention_dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.embed(tokens).unsqueeze(1)
        hidden = F.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=self.attention_dropout)
        hidden = F.dropout(F.dropout(hidden.squeeze(1), self.dropout), 0.5, training=False)
        noise = torch.rand(6, generator=torch.Generator().manual_seed(1)).to(hidden.device)
        logits: torch.Tensor = self.inner.head(hidden + noise)
        return logits


def that_drops_nothing() -> nn.Module:
    return Dropping()


def with_functional_dropout() -> nn.Module:
    return Dropping(dropout=0.1)


def with_attention_dropout() -> nn.Module:
    return Dropping(attention_dropout=0.1)


class Looking(Bigram):
    """Looks at its numbers, which the meta device does not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (2.0 if tokens.max().item() > 9 else 1.0)


def that_looks_at_numbers() -> nn.Module:
    return Looking()


def with_noise() -> nn.Module:
    return nn.Sequential(Bigram(), nn.RReLU())


def with_sync_batch_norm() -> nn.Module:
    return nn.Sequential(Bigram(), nn.SyncBatchNorm(8))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(Bigram(), nn.BatchNorm1d(8))


class Labelled(nn.Module):
    """Returns a dict, as models of some libraries do, but calls its logits something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bigram()

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.inner(tokens)}


def labelled() -> nn.Module:
    return Labelled()


def pooled() -> nn.Module:
    """Logits for sequences of 64 tokens, not for tokens."""
    return nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), nn.Linear(64 * 8, 256))


def that_leaves() -> nn.Module:
    """A program that is named as a model."""
    sys.exit(0)


class Shrinking(Bigram):
    """Divides its head by its norm, in place, before it is used."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.norm())
        return super().forward(tokens)


def that_shrinks() -> nn.Module:
    return Shrinking()


class Replacing(Bigram):
    """Puts another parameter in the place of one of its own, with the same bits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.norm.weight = nn.Parameter(self.norm.weight.detach().clone())
        return super().forward(tokens)


def that_replaces() -> nn.Module:
    return Replacing()


def with_max_norm() -> nn.Module:
    model = Bigram()
    model.embed.max_norm = 0.5
    return model


def with_complex() -> nn.Module:
    model = Bigram()
    model.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    return model


class Asking(Bigram):
    """Asks for its process group, and holds numbers that are none, an empty parameter and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown = nn.Parameter(torch.full((3,), torch.nan), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.count = nn.Parameter(torch.arange(2), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (dist.get_world_size() / 2) + self.nothing.sum()


def that_asks() -> nn.Module:
    return Asking()

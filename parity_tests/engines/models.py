"""Models as users bring them, by `module:function`."""

from __future__ import annotations

import torch
from torch import nn


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


def with_noise() -> nn.Module:
    return nn.Sequential(Bigram(), nn.RReLU())


def with_sync_batch_norm() -> nn.Module:
    return nn.Sequential(Bigram(), nn.SyncBatchNorm(8))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(Bigram(), nn.BatchNorm1d(8))


class Labelled(nn.Module):
    """Returns a dict, as models of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bigram()

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.inner(tokens)}


def labelled() -> nn.Module:
    return Labelled()


def pooled() -> nn.Module:
    """Logits for sequences of 64 tokens, not for tokens."""
    return nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), nn.Linear(64 * 8, 256))

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

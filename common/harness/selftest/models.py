"""The model that most faults are planted in: two blocks of a few small matrices, uneven on two ranks and on three.

It has what faults are about: neighbours of one shape, a buffer, and on request a tied or a frozen parameter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HIDDEN = 256, 12, 95
"""All bytes are tokens; 95 rows leave a rest on 2, 3 and 4 ranks; weights outweigh activations of a few tokens."""


class Scale(nn.Module):
    """Multiplies by a buffer."""

    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.linspace(0.8, 1.2, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] to [..., dim]."""
        return x * self.factor.to(x.dtype)


class Block(nn.Module):
    """`x + down(silu(gate x) * up x)`, `x` scaled on the way in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        scaled = self.scale(x)
        added: torch.Tensor = self.down(F.silu(self.gate(scaled)) * self.up(scaled))
        return x + added


class Small(nn.Module):
    """Token ids [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def small() -> nn.Module:
    """Every parameter its own, every one trained."""
    return Small()


def tied() -> nn.Module:
    """The head is the embedding."""
    return Small(tied=True)


def frozen() -> nn.Module:
    """One matrix of the first block is not trained."""
    model = Small()
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


FROZEN = "blocks.0.gate.weight"

"""A model that is no language model: a small vision transformer that finds out where in a picture a bump is.

    fsdp-parity compare --model examples.my_model:build --engines eager,compiled --param-dtype bf16

`build` returns a task of three: the model, its batches and its loss (`common/task.py` says what each has to keep).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SIDE, PATCH, DIM, HEADS, DEPTH = 16, 4, 32, 4, 2
"""Pixels of a picture and of a patch; width, heads and blocks of the model."""


class Block(nn.Module):
    """Attention and a network of two layers, each on normed inputs and added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From x [batch, patches, DIM] to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        added: torch.Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return added


class Finder(nn.Module):
    """A vision transformer that gives the centre and the width of the bump in each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, DIM, kernel_size=PATCH, stride=PATCH)
        self.position = nn.Embedding((SIDE // PATCH) ** 2, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.centre = nn.Linear(DIM, 2)
        self.width = nn.Linear(DIM, 1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """From image [batch, 1, SIDE, SIDE] to centre [batch, 2] and width [batch, 1]."""
        x = self.embed(image).flatten(2).transpose(1, 2)
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        pooled = self.norm(x).mean(1)
        return {"centre": self.centre(pooled), "width": self.width(pooled)}


def batch(step: int, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`size` pictures of one bump each; torch's generator is set before each call, so the same step is the same."""
    centre, width = torch.rand(size, 2), 0.1 + 0.2 * torch.rand(size, 1)
    line = torch.linspace(0, 1, SIDE)
    across, down = (line - centre[:, :1]) / width, (line - centre[:, 1:]) / width
    image = torch.exp(-(across[:, None, :] ** 2 + down[:, :, None] ** 2))
    return {"image": image[:, None]}, {"centre": centre, "width": width}


def loss(output: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error of all three numbers."""
    return F.mse_loss(output["centre"], targets["centre"]) + F.mse_loss(output["width"], targets["width"])


def build() -> tuple[nn.Module, Any, Any]:
    """Model, batches, loss."""
    return Finder(), batch, loss

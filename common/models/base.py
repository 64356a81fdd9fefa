"""What every model of the registry has: a frozen config, and a forward from tokens to logits.

The models are plain modules that know nothing of sharding. They keep three rules that sharding needs:

- a weight is read once per forward, by the module that owns it, since under FSDP each read may be a gather;
- no module takes a floating-point table (such as a rotary cache) as an input, since FSDP casts those inputs;
- no buffers: there is nothing that a cast, `to_empty` or a move could spoil.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import nn

from common.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters that all models have.

    Attributes:
        vocab_size: number of token ids.
        dim: width of the residual stream.
        n_layers: number of blocks.
        n_heads: attention heads per block; divides `dim`.
        max_seq_len: longest sequence in tokens.
        tied: the output head is the token embedding, one parameter under two names.
        bias: projections inside blocks have biases, and so have norms that can.
        frozen: names of modules and parameters that are not trained.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    max_seq_len: int
    tied: bool = False
    bias: bool = False
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                raise ConfigError(f"model config: expected {field.name} above 0, found {value}")
        if self.dim % self.n_heads:
            raise ConfigError(
                f"model config: dim {self.dim} does not divide over {self.n_heads} heads; change dim or n_heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads


class LanguageModel(nn.Module):
    """A decoder: tokens [batch, seq] to logits [batch, seq, vocab_size].

    Attributes:
        config: its hyperparameters.
        RESIDUAL_OUTPUTS: names, within a block, of the projections that are added to the residual stream;
            initialisation scales them down by depth.
    """

    config: ModelConfig
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position."""
        raise NotImplementedError


def check_seq(seq: int, max_seq_len: int | None) -> None:
    """Refuse a sequence that a model has no positions for; None is a model that does not say.

    Raises:
        ConfigError: `seq` is above `max_seq_len`.
    """
    if max_seq_len is not None and seq > max_seq_len:
        raise ConfigError(f"seq: the model holds at most {max_seq_len} tokens, found {seq}; lower --seq")


def freeze(model: LanguageModel) -> None:
    """Freeze what the config of `model` says; a module's name stands for all parameters in it.

    Raises:
        ConfigError: a name that is no module and no parameter.
    """
    places: dict[str, nn.Module | nn.Parameter] = {
        **dict(model.named_modules(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    del places[""]
    for name in model.config.frozen:
        if name not in places:
            raise ConfigError(
                f"frozen: {name!r} names no module and no parameter of {type(model).__name__}{hint(name, places)}; "
                f"its parts are {', '.join(child for child, _ in model.named_children())}"
            )
        places[name].requires_grad_(False)


def hint(name: str, known: Iterable[str]) -> str:
    """A parenthesis with the closest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def embedding(rows: int, dim: int) -> nn.Embedding:
    """An embedding table [rows, dim], uninitialised.

    `nn.Embedding` would draw it from a normal distribution, which on the meta device imports the whole of
    torch's compiler: seconds in every process.
    """
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)
    return table

"""A task: a model with batches and a loss of its own, for whoever trains something else than token ids to logits.

    def build():
        def batch(step, size):
            x = torch.randn(size, 8)
            return x, x.sum(1, keepdim=True)

        return nn.Linear(8, 1), batch, nn.MSELoss()

A bare tuple of three is a task too, so that code outside this repository needs nothing from it. Its parts:

model   a module whose parameters are real numbers, which neither forward nor loss changes. It is called with the
        inputs: one tensor, a tuple (`model(*inputs)`) or a dict (`model(**inputs)`). What it returns goes to the loss
        as it is, a dict or a dataclass too.
batch   `batch(step, size)` returns `(inputs, targets)`, the whole batch of that step: each tensor in them, however
        nested, has `size` samples in dimension 0. What is no tensor (None, a number, a word) goes along as it is.
loss    `loss(output, targets)` returns the mean over samples, a tensor of no dimensions.

[Note: one batch, however many ranks]
Every rank makes the whole batch on the CPU and takes its rows, samples `rank * size / ranks` up to the next rank's, so
that W ranks together see what one process sees. That asks for a batch function which gives the same batch whenever it
is asked for the same step. Drawing at random is fine: torch's generator is set from seed and step before each call.
And the mean over ranks is the mean over samples only if the loss is one: a sum over samples comes out W times too
small, and a mean that divides by the weights of its own rows (by how many of their tokens count, say) is another one on
each rank. Whoever weights samples lets the batch function scale the weights: their mean over the whole batch is 1.

Floating-point tensors of a batch are cast to the dtype of the parameters, float64 on the referee; engines cast inputs
on to the dtype that computes, as they do for any model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.errors import ConfigError
from common.seed import seed_for

Batch = tuple[Any, Any]
"""Inputs and targets."""

_PLAIN = (type(None), bool, int, float, str)
"""What a batch may hold besides tensors: the same for every sample."""


@dataclass(frozen=True)
class Task:
    """What a user's function returns to train on batches of its own; the module's docstring says what each part keeps.

    Attributes:
        model: called with the inputs of a batch.
        batch: from step and number of samples to inputs and targets.
        loss: from the model's output and the targets to their mean loss.

    Raises:
        ConfigError: a part of another kind.
    """

    model: nn.Module
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Any], torch.Tensor]

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"task: expected an nn.Module as its model, found {_kind(self.model)}")
        for name, call in (("batch", "batch(step, size)"), ("loss", "loss(output, targets)")):
            part = getattr(self, name)
            if not callable(part):
                raise ConfigError(f"task: expected a function {call}, found {_kind(part)}")

    def share(self, step: int, size: int, *, seed: int, dtype: torch.dtype, rank: int = 0, ranks: int = 1) -> Batch:
        """One rank's rows of a step's batch; see [Note: one batch, however many ranks].

        Args:
            step: from 0.
            size: samples over all ranks; divides over `ranks`.
            seed: of the job.
            dtype: of floating-point tensors.
            rank, ranks: whose rows, of how many.

        Raises:
            ConfigError: not inputs and targets, no tensor among the inputs, or one without `size` samples. What the
                user's own code raises is passed on as it is.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_for("batch", seed, step))
            found = self.batch(step, size)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(f"task: expected batch(step, size) to return (inputs, targets), found {_kind(found)}")
        inputs, targets = found
        rows = slice(rank * size // ranks, (rank + 1) * size // ranks)
        tensors = 0

        def cut(tensor: torch.Tensor, where: str) -> torch.Tensor:
            nonlocal tensors
            tensors += where.startswith("inputs")
            if tensor.shape[:1] != (size,):
                raise ConfigError(
                    f"task: expected {size} samples in dimension 0 of {where}, found shape {list(tensor.shape)}; "
                    "batch(step, size) gives the whole batch, and each rank takes its rows"
                )
            own = tensor[rows].to(dtype) if tensor.is_floating_point() else tensor[rows]
            return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own  # let go of the others' rows

        own = map_tensors(inputs, cut, "inputs"), map_tensors(targets, cut, "targets")
        if not tensors or not isinstance(own[0], (torch.Tensor, tuple, list, dict)):
            raise ConfigError(
                f"task: expected inputs that the model can be called with, a tensor, a tuple or a dict of them, found "
                f"{_kind(inputs)}"
            )
        return own


def as_task(found: object, name: str) -> nn.Module | Task:
    """What the function of model `name` returned: a module that is trained on tokens, or a task.

    Raises:
        ConfigError: neither.
    """
    if isinstance(found, (nn.Module, Task)):
        return found
    if isinstance(found, tuple) and len(found) == 3:
        return Task(*found)
    raise ConfigError(
        f"model {name!r}: expected the function to return an nn.Module, or a task of three (model, batch, loss), found "
        f"{_kind(found)}"
    )


def call_model(module: Callable[..., Any], inputs: Any) -> Any:
    """What `module` makes of the inputs of a batch: one tensor, a tuple or a dict of arguments."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def check_loss(loss: object, compute_dtype: torch.dtype) -> torch.Tensor:
    """`loss`, if a step can be taken from it.

    Raises:
        ConfigError: no scalar, one that no parameter had a part in, or one narrower than what was computed, which
            would hide what it is judged for.
    """
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ConfigError(
            f"task: expected loss(output, targets) to return a tensor of no dimensions, the mean over samples, found "
            f"{_kind(loss)}"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError("task: expected a loss with a gradient, found one that no trained parameter had a part in")
    if torch.promote_types(loss.dtype, compute_dtype) is not loss.dtype:
        raise ConfigError(f"task: expected a loss in {compute_dtype} or wider, found {loss.dtype}; do not cast it down")
    return loss


def map_tensors(tree: Any, fn: Callable[[torch.Tensor, str], torch.Tensor], where: str = "batch") -> Any:
    """Apply `fn` to each tensor of a batch, and to what it is called.

    Raises:
        ConfigError: something that is neither a tensor, a tuple, list or mapping, nor plain.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree, where)
    if isinstance(tree, Mapping):
        return {key: map_tensors(item, fn, f"{where}[{key!r}]") for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(item, fn, f"{where}[{i}]") for i, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, _PLAIN):
        return tree
    raise ConfigError(
        f"task: expected tensors in tuples, lists or dicts as {where}, found {_kind(tree)}, of which "
        "no rows can be taken"
    )


def same_batch(first: Batch, second: Batch) -> bool:
    """Whether two batches hold equal tensors, not a number being equal to itself; shapes are all that meta has."""
    mine, others = _tensors(first), _tensors(second)
    return mine.keys() == others.keys() and all(_equal(mine[where], others[where]) for where in mine)


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    map_tensors(batch, lambda tensor, where: found.setdefault(where, tensor))
    return found


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return first.is_meta or bool(((first == second) | (first.isnan() & second.isnan())).all())


def _kind(found: object) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor {list(found.shape)}"
    if isinstance(found, tuple):
        return f"a tuple of {len(found)}"
    return f"{type(found).__name__}"

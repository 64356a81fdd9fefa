"""What faults do to rows: each a change as `shards` plants it, given the scene, the parameter's name and the rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.harness.selftest.plant import Scene
from common.harness.selftest.shards import Change


def times(factor: float) -> Change:
    """Every row times `factor`."""

    def change(scene: Scene, name: str, rows: Tensor) -> Tensor:
        return rows * factor

    return change


def times_ranks(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """A divide that was forgotten."""
    return rows * scene.ranks


def times_root_of_ranks(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Clipped by the norm of one rank's shard, as if it were the norm of all."""
    return rows * math.sqrt(scene.ranks)


def rolled(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Each row where the one after it belongs."""
    return rows.roll(1, 0)


def zero(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Nothing arrives."""
    return torch.zeros_like(rows)


def dropped_on_last(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Nothing arrives at the last rank."""
    return torch.zeros_like(rows) if scene.is_last else rows


def doubled_on_last(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """The last rank, which has fewer rows, divides by fewer."""
    return rows * 2 if scene.is_last else rows


def without_first_row_on_last(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """The last rank loses its first row."""
    if not scene.is_last:
        return rows
    return torch.cat([torch.zeros_like(rows[:1]), rows[1:]])


def unwritten_on_last(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """The last rank's first row is memory that nobody wrote."""
    if not scene.is_last:
        return rows
    return torch.cat([torch.full_like(rows[:1], math.nan), rows[1:]])


def of_the_step_before(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Handed out one step late; the first step's twice."""
    before: Tensor = scene.kept.get(name, rows)
    scene.kept[name] = rows.clone()
    return before


def only_once(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Right at the first step, nothing after it."""
    seen = scene.kept.setdefault(name, 0)
    scene.kept[name] += 1
    return torch.zeros_like(rows) if seen else rows


def first_ever(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """What the first step had."""
    kept: Tensor = scene.kept.setdefault(name, rows.clone())
    return kept


def rounded(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """Through bf16 and back."""
    return rows.bfloat16().to(rows.dtype)


def zero_on_last(scene: Scene, name: str, rows: Tensor) -> Tensor:
    """The last rank gives nothing to the sum."""
    return torch.zeros_like(rows) if scene.is_last else rows

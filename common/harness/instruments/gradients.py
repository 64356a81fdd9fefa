"""The whole gradient of each parameter: gathered from its shards, digested bit by bit, measured in float64.

A sharded gradient is gathered with `DTensor.full_tensor()`, a collective: all ranks collect at the same time, and
never inside a profiled step. Only one parameter is whole at a time, unless the caller keeps them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common.errors import EngineError


@dataclass(frozen=True)
class GradientSummary:
    """The gradients of one step.

    Attributes:
        norms: by parameter, L2 norm of the whole gradient, in float64.
        digests: by parameter, a hash of dtype, shape and bits.
        kept: by parameter, the whole gradient [global shape]; empty unless asked for.
    """

    norms: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """L2 norm of all gradients together."""
        return math.sqrt(sum(norm * norm for norm in self.norms.values()))


def collect_gradients(model: nn.Module, *, rank: int = 0, ranks: int = 1, keep: bool = False) -> GradientSummary:
    """Summarise the gradients that `model` holds, on rank 0; the other ranks take part and return nothing.

    Args:
        model: holds parameters and gradients, sharded or whole.
        rank, ranks: this rank and how many hold the model; with one rank nothing is sent.
        keep: keep the whole gradients too.

    Raises:
        EngineError: a gradient is missing on some rank, is sharded in another way than its parameter, or, where
            each rank has a whole copy, differs between ranks.
    """
    params = dict(model.named_parameters())
    gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
    if ranks > 1:
        _check_same_names(sorted(gradients))
    summary = GradientSummary()
    copies: dict[str, str] = {}
    for name, gradient in gradients.items():
        _check_placement(name, params[name], gradient, rank)
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        is_copy = ranks > 1 and _is_replicated(gradient)
        if rank and not is_copy:
            continue
        code = digest(whole)
        if is_copy:
            copies[name] = code
        summary.norms[name] = l2_norm(whole)
        summary.digests[name] = code
        if keep:
            summary.kept[name] = whole.detach().cpu().clone()
    if ranks > 1:
        _check_same_copies(copies)
    return GradientSummary() if rank else summary


def _is_replicated(gradient: torch.Tensor) -> bool:
    """Whether several ranks hold what should be the same values."""
    return not isinstance(gradient, DTensor) or any(placement.is_replicate() for placement in gradient.placements)


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's dtype, shape and bits; equal only for equal bits (-0.0 is not 0.0)."""
    code = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    code.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return code.hexdigest()


def l2_norm(tensor: torch.Tensor) -> float:
    """L2 norm of one tensor, in float64; not finite if an element is not."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _check_placement(name: str, param: torch.Tensor, gradient: torch.Tensor, rank: int) -> None:
    expected = param.placements if isinstance(param, DTensor) else None
    found = gradient.placements if isinstance(gradient, DTensor) else None
    if expected != found:
        raise EngineError(
            f"gradient of {name!r} on rank {rank}: expected it placed like its parameter, {_placed(expected)}, found "
            f"{_placed(found)}; the engine has to leave the mean over ranks in .grad, sharded as the parameter is"
        )


def _placed(placements: object) -> str:
    return "a plain tensor" if placements is None else f"a DTensor with {placements}"


def _check_same_names(names: list[str]) -> None:
    """See that the same parameters have a gradient on each rank; else gathering them would never end."""
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    for rank, others in enumerate(everyone):
        odd = sorted(set(others) ^ set(everyone[0]))
        if odd:
            has = rank if odd[0] in others else 0
            raise EngineError(
                f"gradient of {odd[0]!r}: rank {has} has one, rank {0 if has else rank} has none; ranks must reduce "
                "the same parameters"
            )


def _check_same_copies(copies: dict[str, str]) -> None:
    """See that ranks with a whole copy of a gradient hold the same bits."""
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, copies)
    for rank, others in enumerate(everyone):
        for name, code in others.items():
            if code != everyone[0][name]:
                raise EngineError(
                    f"gradient of {name!r}: rank {rank} and rank 0 each hold a whole copy, and the copies differ; "
                    "was it averaged over ranks?"
                )

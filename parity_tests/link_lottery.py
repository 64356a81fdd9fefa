"""A stream of random collectives with what each should give, for the tests of the emulated link."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.harness.launch import RankContext

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACT = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
# torch 2.13 renamed the two and warns of the old names; 2.11 and 2.12 have only those.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Ops = dist.ReduceOp
Check = Callable[[], bool]
FACTORS = (0.5, 1 / 3, 3.0, -1.7)
"""Of premultiplied sums, one for each rank."""


def rank_order(pieces: list[Tensor], op: str) -> Tensor:
    """((r0 op r1) op r2) ..., in the dtype of the pieces."""
    if op == "PREMUL_SUM":
        products = [
            piece.double() * torch.tensor(FACTORS[rank], dtype=piece.dtype) for rank, piece in enumerate(pieces)
        ]
        return rank_order([product.to(piece.dtype) for product, piece in zip(products, pieces, strict=True)], "SUM")
    total = pieces[0]
    for piece in pieces[1:]:
        if op in ("SUM", "AVG"):
            total = total | piece if total.dtype is torch.bool else total + piece
        elif op == "PRODUCT":
            total = total & piece if total.dtype is torch.bool else total * piece
        elif op in ("MIN", "MAX"):
            total = torch.where(piece < total if op == "MIN" else piece > total, piece, total)
        else:
            total = {"BAND": total & piece, "BOR": total | piece, "BXOR": total ^ piece}[op]
    if op != "AVG":
        return total
    if total.is_complex():
        return torch.complex(total.real / len(pieces), total.imag / len(pieces))
    return total / len(pieces)


class Lottery:
    """A seeded stream of random collectives that all ranks draw alike; each knows what every rank puts in."""

    def __init__(self, ctx: RankContext, seed: int, largest: int) -> None:
        self.ctx, self.random, self.largest = ctx, random.Random(seed), largest
        self.kinds: set[str] = set()

    def draw(self) -> tuple[dist.Work | None, str, Check]:
        """Start one collective, asynchronously; its handle, its name, and whether its result is what maths says."""
        gathers = [self.gather, self.gather_list, self.gather_many, self.gather_to, self.broadcast, self.barrier]
        scatters = [self.scatter, self.scatter_list, self.scatter_many, self.scatter_from, self.reduce_all]
        others = [self.reduce_many, self.reduce_to, self.exchange, self.exchange_list]
        make = self.random.choice([*gathers, *scatters, *others])
        work, check = make()
        self.kinds.add(make.__name__)
        return work, make.__name__, check

    # --- what goes in

    def numel(self) -> int:
        if self.random.random() < 0.02:
            return self.random.randrange(self.largest // 2, self.largest)
        return self.random.choice((0, 1, 3, 17, 64, 200))

    def dtype_and_op(self) -> tuple[torch.dtype, str]:
        dtype = self.random.choice(FLOATS + EXACT + COMPLEX)
        ops = ["SUM"]
        if dtype in FLOATS + COMPLEX:
            ops.append("AVG")
        if dtype in FLOATS:
            ops.append("PREMUL_SUM")
        if dtype not in COMPLEX:
            ops += ["PRODUCT", "MIN", "MAX"]
        if dtype in EXACT:
            ops += ["BAND", "BOR", "BXOR"]
        return dtype, self.random.choice(ops)

    def reduction(self, op: str) -> Any:
        """The reduction of that name; of a premultiplied sum with this rank's factor."""
        return premultiplied(FACTORS[self.ctx.rank]) if op == "PREMUL_SUM" else getattr(Ops, op)

    def inputs(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """One tensor per rank."""
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 40))
        if dtype in EXACT:
            many = torch.randint(0, 2 if dtype is torch.bool else 100, (self.ctx.ranks, numel), generator=generator)
            return list(many.to(dtype))
        if dtype in COMPLEX:
            return list(torch.randn(self.ctx.ranks, numel, dtype=dtype, generator=generator))
        return list(torch.randn(self.ctx.ranks, numel, generator=generator).to(dtype))

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The same elements, sometimes with gaps between them."""
        if self.random.random() < 0.25:
            gaps = torch.zeros(tensor.numel(), 2, dtype=tensor.dtype)
            gaps[:, 0] = tensor
            return gaps[:, 0]
        return tensor.clone()

    # --- the collectives; each returns a handle and a check

    def gather(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, _) = self.numel(), self.dtype_and_op()
        inputs = self.inputs(numel, dtype)
        out = self.laid_out(torch.zeros(numel * self.ctx.ranks, dtype=dtype))
        mine = self.laid_out(inputs[self.ctx.rank])
        if self.random.random() < 0.3 and out.is_contiguous():
            mine = out[self.ctx.rank * numel : (self.ctx.rank + 1) * numel].copy_(mine)
            work = gather_into(out, mine)
        else:
            work = gather_into(out, mine)
            mine.zero_()  # the input may be used again at once
        return work, lambda: torch.equal(out, torch.cat(inputs))

    def gather_list(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, _) = self.numel(), self.dtype_and_op()
        inputs = self.inputs(numel, dtype)
        outs = [self.laid_out(torch.zeros(numel, dtype=dtype)) for _ in inputs]
        work = dist.all_gather(outs, self.laid_out(inputs[self.ctx.rank]), async_op=True)
        return work, lambda: all(map(torch.equal, outs, inputs))

    def gather_many(self) -> tuple[dist.Work | None, Check]:
        drawn = [self.inputs(self.numel(), self.dtype_and_op()[0]) for _ in range(3)]
        mine = [inputs[self.ctx.rank].clone() for inputs in drawn]
        outs = [torch.zeros(len(inputs) * inputs[0].numel(), dtype=inputs[0].dtype) for inputs in drawn]
        work = world().allgather_into_tensor_coalesced(outs, mine)
        return work, lambda: all(map(torch.equal, outs, map(torch.cat, drawn)))

    def scatter(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, op) = self.numel(), self.dtype_and_op()
        inputs = self.inputs(numel * self.ctx.ranks, dtype)
        expected = rank_order([tensor.view(self.ctx.ranks, -1)[self.ctx.rank] for tensor in inputs], op)
        mine = self.laid_out(inputs[self.ctx.rank])
        out = self.laid_out(torch.zeros(numel, dtype=dtype))
        if self.random.random() < 0.3 and mine.is_contiguous():
            out = mine[self.ctx.rank * numel : (self.ctx.rank + 1) * numel]
        work = scatter_into(out, mine, self.reduction(op))
        return work, lambda: same(out, expected)

    def scatter_list(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, op) = self.numel(), self.dtype_and_op()
        inputs = self.inputs(numel * self.ctx.ranks, dtype)
        expected = rank_order([tensor.view(self.ctx.ranks, -1)[self.ctx.rank] for tensor in inputs], op)
        mine = [self.laid_out(row) for row in inputs[self.ctx.rank].view(self.ctx.ranks, -1)]
        out = torch.zeros(numel, dtype=dtype)
        work = dist.reduce_scatter(out, mine, op=self.reduction(op), async_op=True)
        return work, lambda: same(out, expected)

    def scatter_many(self) -> tuple[dist.Work | None, Check]:
        _, op = self.dtype_and_op()
        op = op if op in ("SUM", "AVG", "PREMUL_SUM") else "SUM"
        drawn = [self.inputs(self.numel() * self.ctx.ranks, self.random.choice(FLOATS)) for _ in range(3)]
        expected = [
            rank_order([tensor.view(self.ctx.ranks, -1)[self.ctx.rank] for tensor in inputs], op) for inputs in drawn
        ]
        mine = [inputs[self.ctx.rank].clone() for inputs in drawn]
        outs = [torch.zeros_like(tensor) for tensor in expected]
        options = dist.ReduceScatterOptions()
        options.reduceOp = self.reduction(op)
        work = world().reduce_scatter_tensor_coalesced(outs, mine, options)
        return work, lambda: all(map(same, outs, expected))

    def reduce_all(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, op) = self.numel(), self.dtype_and_op()
        inputs = self.inputs(numel, dtype)
        mine = self.laid_out(inputs[self.ctx.rank])
        work = dist.all_reduce(mine, op=self.reduction(op), async_op=True)
        return work, lambda: same(mine, rank_order(inputs, op))

    def reduce_many(self) -> tuple[dist.Work | None, Check]:
        drawn = [self.inputs(self.numel(), torch.float32) for _ in range(3)]
        mine = [inputs[self.ctx.rank].clone() for inputs in drawn]
        work = world().allreduce_coalesced(mine)
        return work, lambda: all(map(same, mine, (rank_order(inputs, "SUM") for inputs in drawn)))

    def broadcast(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, _) = self.numel(), self.dtype_and_op()
        inputs, root = self.inputs(numel, dtype), self.random.randrange(self.ctx.ranks)
        mine = self.laid_out(inputs[self.ctx.rank])
        return dist.broadcast(mine, root, async_op=True), lambda: torch.equal(mine, inputs[root])

    def exchange(self) -> tuple[dist.Work | None, Check]:
        dtype, _ = self.dtype_and_op()
        ranks, me = self.ctx.ranks, self.ctx.rank
        if self.random.random() < 0.5:
            numel = self.numel()
            splits = [[numel] * ranks] * ranks
        else:
            splits = [[self.random.randrange(9) for _ in range(ranks)] for _ in range(ranks)]
        inputs = [self.inputs(sum(row), dtype)[rank] for rank, row in enumerate(splits)]
        wanted = [row[me] for row in splits]
        out = self.laid_out(torch.zeros(sum(wanted), dtype=dtype))
        expected = torch.cat([tensor.split(row)[me] for tensor, row in zip(inputs, splits, strict=True)])
        work = dist.all_to_all_single(out, self.laid_out(inputs[me]), wanted, splits[me], async_op=True)
        return work, lambda: torch.equal(out, expected)

    def exchange_list(self) -> tuple[dist.Work | None, Check]:
        dtype, _ = self.dtype_and_op()
        ranks, me = self.ctx.ranks, self.ctx.rank
        grid = [self.inputs(self.numel(), dtype) for _ in range(ranks)]  # grid[r][s]: from rank r to rank s
        outs = [torch.zeros_like(row[me]) for row in grid]
        work = dist.all_to_all(outs, grid[me], async_op=True)
        return work, lambda: all(map(torch.equal, outs, (row[me] for row in grid)))

    def gather_to(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, _) = self.numel(), self.dtype_and_op()
        inputs, root = self.inputs(numel, dtype), self.random.randrange(self.ctx.ranks)
        outs = [torch.zeros_like(tensor) for tensor in inputs] if self.ctx.rank == root else None
        work = dist.gather(inputs[self.ctx.rank], outs, dst=root, async_op=True)
        return work, lambda: outs is None or all(map(torch.equal, outs, inputs))

    def scatter_from(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, _) = self.numel(), self.dtype_and_op()
        inputs, root = self.inputs(numel, dtype), self.random.randrange(self.ctx.ranks)
        out = torch.zeros(numel, dtype=dtype)
        work = dist.scatter(out, inputs if self.ctx.rank == root else None, src=root, async_op=True)
        return work, lambda: torch.equal(out, inputs[self.ctx.rank])

    def reduce_to(self) -> tuple[dist.Work | None, Check]:
        numel, (dtype, op) = self.numel(), self.dtype_and_op()
        inputs, root = self.inputs(numel, dtype), self.random.randrange(self.ctx.ranks)
        mine = self.laid_out(inputs[self.ctx.rank])
        work = dist.reduce(mine, root, op=self.reduction(op), async_op=True)
        expected = rank_order(inputs, op) if self.ctx.rank == root else inputs[self.ctx.rank]
        return work, lambda: same(mine, expected)

    def barrier(self) -> tuple[dist.Work | None, Check]:
        return dist.barrier(async_op=True), lambda: True


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal dtypes and bits; a not-a-number equals itself."""
    if found.is_complex():
        found, expected = torch.view_as_real(found.contiguous()), torch.view_as_real(expected)
    return found.dtype is expected.dtype and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def world() -> Any:
    """The default group; the type stubs lack its coalesced collectives."""
    return dist.group.WORLD


def gather_into(out: Tensor, tensor: Tensor, async_op: bool = True) -> dist.Work | None:
    work: dist.Work | None = _all_gather(out, tensor, async_op=async_op)
    return work


def scatter_into(out: Tensor, tensor: Tensor, op: Any, async_op: bool = True) -> dist.Work | None:
    work: dist.Work | None = _reduce_scatter(out, tensor, op=op, async_op=async_op)
    return work


def premultiplied(factor: float) -> Any:
    """A sum of products with a factor, as torch's fully_shard asks for on NCCL."""
    from parity_tests.torch_private import premultiplied_sum  # here: the file imports Inductor, which takes seconds

    return premultiplied_sum(factor)

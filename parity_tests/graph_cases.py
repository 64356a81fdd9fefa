"""Small models and a recorder of graphs, for the tests of the compiled engine that need no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, Node

from fsdp_compiled import torch_private
from parity_tests.torch_private import FakeStore

c10d = torch.ops._c10d_functional
GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_TO_ALL = c10d.all_to_all_single.default
WAIT = c10d.wait_tensor.default
BLOCKS = 2
"""Of a `Net`: the least in which one block's gather can travel while another one computes."""
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Block(nn.Module):
    """Registers its parameters in another order than it uses them; sizes that no small world divides evenly."""

    def __init__(self, dim: int = 10, hidden: int = 14) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, dim)
        self.up = nn.Linear(dim, hidden)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, blocks: int = BLOCKS, dim: int = 10, vocab: int = 13, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, seq] to logits [batch, seq, vocab]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """A process group of `world_size` ranks of which this process is one and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


def trace(model: nn.Module, *inputs: torch.Tensor, train: bool = True) -> list[Graph]:
    """Run one step of a model sharded for "aot_eager"; the graphs that ran: forward, then backward."""
    graphs: list[Graph] = []
    boxed: Callable[..., Callable[..., object]] = torch_private.boxed

    def record(gm: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        graphs.append(gm.graph)
        return boxed(gm, example)

    with mock.patch.object(torch_private, "boxed", record), torch.set_grad_enabled(train):
        output = model(*inputs)
        if train:
            output.float().sum().backward()
    return graphs


def calls(graph: Graph, *targets: object) -> list[Node]:
    """The nodes of `graph` that call one of `targets`, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def sources(node: Node) -> list[Node]:
    """The placeholders that `node` is computed from, in the order in which its arguments name them."""
    if node.op == "placeholder":
        return [node]
    return [source for argument in node.all_input_nodes for source in sources(argument)]

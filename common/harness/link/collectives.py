"""The collectives of torch over a link: what each rank sends, what goes on the wire, and how outputs are written.

W ranks; n bytes is one rank's share, N = W n the full buffer; sizes are those that the log shows.

    kind            full buffer   wire bytes           what is written
    all_gather      N             (W-1) n              every rank's share, in rank order
    reduce_scatter  N             (W-1) n              the reduction of this rank's share
    all_reduce      n             2 (W-1) n / W        the reduction
    broadcast       n             n                    the root's tensor
    all_to_all      own input     the larger of what   from each rank what it has for this one; splits may be uneven,
                                  is sent and received and the rank that moves most decides
    gather          N             (W-1) n              at the root, every rank's share
    scatter         N             (W-1) n              this rank's share of the root's tensors
    reduce          n             n                    at the root, the reduction
    barrier         0             0                    nothing

Coalesced calls are one operation. Tensors need not be contiguous, outputs may be the inputs or parts of them.

[Note: shared elements]
A tensor that is written must not be one whose elements share memory, such as an expanded one. gloo refuses it where it
copies results out; elsewhere it takes `numel` elements from the tensor's first address on, and so reads, and writes,
past the end of its memory, at the root of a broadcast too. Here it is refused on every rank. An input may share
elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.errors import EngineError
from common.harness.link.board import pieces_of
from common.harness.link.link import Link
from common.harness.link.meter import Operation
from common.harness.link.reductions import ReduceOp
from common.harness.link.terms import terms_of


def all_gather(link: Link, inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> Operation:
    """Gather each of `inputs`; `outputs` has for each either one tensor, for all ranks, or one per rank."""
    for tensor, targets in zip(inputs, outputs, strict=True):
        check_written("all_gather", targets)
        _check_fit("all_gather", targets, tensor.dtype, tensor.numel() * link.size)
    dtypes, sizes = [tensor.dtype for tensor in inputs], [_size(tensor) for tensor in inputs]

    def receive(payloads: list[Tensor]) -> None:
        shares = [pieces_of(payload, sizes) for payload in payloads]
        for place, (dtype, targets) in enumerate(zip(dtypes, outputs, strict=True)):
            _fill(targets, [share[place].view(dtype) for share in shares])

    size = sum(sizes) * link.size
    return link.issue(
        "all_gather",
        size=size,
        wire=sum(sizes) * (link.size - 1),
        payload=[_bytes(tensor) for tensor in inputs],
        receive=receive,
        terms=terms_of(inputs),
    )


def reduce_scatter(
    link: Link, inputs: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor], op: ReduceOp
) -> Operation:
    """Reduce and scatter each of `inputs`, which is either one tensor, for all ranks, or one per rank."""
    check_written("reduce_scatter", outputs)
    for tensors, target in zip(inputs, outputs, strict=True):
        op.check(target.dtype)
        _check_fit("reduce_scatter", tensors, target.dtype, target.numel() * link.size)
    # each share is a piece of its own, so that it is aligned
    shares = [[_bytes(op.sent(tensor)) for tensor in _shares(tensors, link.size)] for tensors in inputs]
    payload = [share for tensor_shares in shares for share in tensor_shares]
    sizes = [share.numel() for share in payload]
    rank = link.rank

    def receive(payloads: list[Tensor]) -> None:
        pieces = [pieces_of(payload, sizes)[rank :: link.size] for payload in payloads]
        for place, target in enumerate(outputs):
            _reduce([rows[place] for rows in pieces], target, op)

    size = sum(sizes)
    return link.issue(
        "reduce_scatter",
        size=size,
        wire=size * (link.size - 1) // link.size,
        payload=payload,
        receive=receive,
        terms=terms_of(outputs, op=op.name),
    )


def all_reduce(link: Link, tensors: Sequence[Tensor], op: ReduceOp) -> Operation:
    """Reduce each tensor in place."""
    for tensor in tensors:
        op.check(tensor.dtype)
    size = sum(map(_size, tensors))
    wire = 2 * size * (link.size - 1) // link.size
    return _reduce_in_place(link, "all_reduce", tensors, op, wire)


def reduce(link: Link, tensors: Sequence[Tensor], op: ReduceOp, root: int) -> Operation:
    """Reduce each tensor in place at the root; elsewhere they stay what they are."""
    for tensor in tensors:
        op.check(tensor.dtype)
    return _reduce_in_place(link, "reduce", tensors, op, sum(map(_size, tensors)), root=root)


def broadcast(link: Link, tensors: Sequence[Tensor], root: int) -> Operation:
    """Overwrite each tensor by the root's."""
    check_written("broadcast", tensors)
    sizes = [_size(tensor) for tensor in tensors]

    def receive(payloads: list[Tensor]) -> None:
        if link.rank != root:
            for tensor, piece in zip(tensors, pieces_of(payloads[root], sizes), strict=True):
                _fill([tensor], [piece.view(tensor.dtype)])

    payload = [_bytes(tensor) for tensor in tensors] if link.rank == root else []
    size, terms = sum(sizes), terms_of(tensors, root=root)
    return link.issue("broadcast", size=size, wire=size, payload=payload, receive=receive, terms=terms)


def all_to_all(link: Link, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Operation:
    """Send `inputs[r]` to rank r, and receive `outputs[r]` from it."""
    check_written("all_to_all", outputs)
    payload = [_bytes(tensor) for tensor in inputs]
    sent, wanted = [piece.numel() for piece in payload], [_size(tensor) for tensor in outputs]
    # receivers do not know how long the pieces for others are
    table = torch.tensor(sent, dtype=torch.int64).view(torch.uint8)

    def receive(payloads: list[Tensor]) -> None:
        for sender, (data, target) in enumerate(zip(payloads, outputs, strict=True)):
            sizes = data[: table.numel()].view(torch.int64).tolist()
            if sizes[link.rank] != wanted[sender]:
                raise EngineError(
                    f"link: all_to_all: place {link.rank} expects {wanted[sender]} bytes from place {sender} of the "
                    f"group, which sends {sizes[link.rank]}; input and output splits must agree"
                )
            piece = pieces_of(data, [table.numel(), *sizes])[1 + link.rank]
            _fill([target], [piece.view(target.dtype)])

    wire = max(sum(sizes) - sizes[link.rank] for sizes in (sent, wanted))
    # one tensor stands for all: torch has seen that their dtypes are equal, and their sizes may differ
    terms = terms_of(inputs[:1])
    return link.issue("all_to_all", size=sum(sent), wire=wire, payload=[table, *payload], receive=receive, terms=terms)


def gather(link: Link, tensor: Tensor, outputs: Sequence[Tensor], root: int) -> Operation:
    """Write every rank's tensor to `outputs` at the root."""
    if link.rank == root:
        check_written("gather", outputs)
        _check_fit("gather", outputs, tensor.dtype, tensor.numel() * link.size)
    size, dtype = _size(tensor), tensor.dtype

    def receive(payloads: list[Tensor]) -> None:
        if link.rank == root:
            _fill(outputs, [payload[:size].view(dtype) for payload in payloads])

    return link.issue(
        "gather",
        size=size * link.size,
        wire=size * (link.size - 1),
        payload=[_bytes(tensor)],
        receive=receive,
        terms=terms_of([tensor], root=root),
    )


def scatter(link: Link, inputs: Sequence[Tensor], output: Tensor, root: int) -> Operation:
    """Write to `output` the root's tensor for this rank."""
    check_written("scatter", [output])
    if link.rank == root:
        _check_fit("scatter", inputs, output.dtype, output.numel() * link.size)
    size = _size(output)

    def receive(payloads: list[Tensor]) -> None:
        piece = pieces_of(payloads[root], [size] * link.size)[link.rank]
        _fill([output], [piece.view(output.dtype)])

    payload = [_bytes(tensor) for tensor in inputs] if link.rank == root else []
    return link.issue(
        "scatter",
        size=size * link.size,
        wire=size * (link.size - 1),
        payload=payload,
        receive=receive,
        terms=terms_of([output], root=root),
    )


def barrier(link: Link) -> Operation:
    """Nothing moves; it is complete when all ranks have come."""
    return link.issue("barrier", size=0, wire=0, payload=[], receive=lambda payloads: None)


def check_written(kind: str, tensors: Sequence[Tensor]) -> None:
    """See [Note: shared elements]."""
    for tensor in tensors:
        if _shares_elements(tensor):
            raise EngineError(
                f"link: {kind}: expected a tensor whose elements lie apart, found shape {list(tensor.shape)} with "
                f"strides {list(tensor.stride())}, whose elements share memory; pass its .contiguous()"
            )


def _reduce_in_place(
    link: Link, kind: str, tensors: Sequence[Tensor], op: ReduceOp, wire: int, *, root: int | None = None
) -> Operation:
    """Reduce on one rank, or on all if there is no root."""
    check_written(kind, tensors)
    sizes = [_size(tensor) for tensor in tensors]

    def receive(payloads: list[Tensor]) -> None:
        if root in (None, link.rank):
            pieces = [pieces_of(payload, sizes) for payload in payloads]
            for place, tensor in enumerate(tensors):
                _reduce([rows[place] for rows in pieces], tensor, op)

    payload = [_bytes(op.sent(tensor)) for tensor in tensors]
    terms = terms_of(tensors, op=op.name, root=root)
    return link.issue(kind, size=sum(sizes), wire=wire, payload=payload, receive=receive, terms=terms)


def _reduce(pieces: Sequence[Tensor], target: Tensor, op: ReduceOp) -> None:
    rows = [piece.view(target.dtype) for piece in pieces]
    if _is_plain(target):
        op.reduce_into(target.data.view(-1), rows)
    else:
        total = torch.empty_like(rows[0])
        op.reduce_into(total, rows)
        _fill([target], [total])


def _fill(targets: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Write 1D `pieces`, one after the other, to the elements of `targets`: all to one, or one to each."""
    if len(targets) == 1 and len(pieces) > 1 and _is_plain(targets[0]):
        targets = targets[0].data.view(len(pieces), -1).unbind()
    elif len(targets) == 1 and len(pieces) > 1:
        pieces = [torch.cat(list(pieces))]
    for target, piece in zip(targets, pieces, strict=True):
        # `.data`: as with gloo, autograd does not see a collective write
        target.data.copy_(piece.view(target.shape))


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one after the other and as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and tensor.numel() > 0


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor as bytes [n], without a copy where that is possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # not `view(-1)`: a contiguous tensor of one element may have any stride
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shares(tensors: Sequence[Tensor], ranks: int) -> Sequence[Tensor]:
    if len(tensors) == ranks:
        return tensors
    return tensors[0].detach().contiguous().view(ranks, -1).unbind() if tensors[0].numel() else [tensors[0]] * ranks


def _shares_elements(tensor: Tensor) -> bool:
    """Whether two elements of a tensor have one place in memory."""
    if tensor.is_contiguous():
        return False
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break  # the steps of one dimension fall within another's, and may still miss each other
        reach += stride * (size - 1)
    else:
        return False
    if dims[0][0] == 0:
        return True
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in dims:
        places = (places[:, None] + stride * torch.arange(size)).view(-1)
    return len(places.unique()) < len(places)


def _check_fit(kind: str, tensors: Sequence[Tensor], dtype: torch.dtype, numel: int) -> None:
    found = sum(tensor.numel() for tensor in tensors)
    if found != numel or any(tensor.dtype is not dtype for tensor in tensors):
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
        raise EngineError(f"link: {kind}: expected {numel} elements of {dtype}, found {found} of {dtypes}")

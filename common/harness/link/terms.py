"""What the ranks of one operation must agree on beside its kind and size: eight bytes to compare, and to put in words.

Ranks that disagree on a root, a reduction or a dtype would each read the others' bytes as something else, and nobody
would notice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from common.harness.link.reductions import REDUCTIONS

_TERMS = struct.Struct("=BBHI")
"""Dtype of the first tensor, reduction, root, and a checksum of the layout of several tensors."""
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
_NO_BYTE, _NO_ROOT = 0xFF, 0xFFFF
NO_TERMS = _TERMS.pack(_NO_BYTE, _NO_BYTE, _NO_ROOT, 0)
"""Those of an operation that moves nothing."""


def terms_of(tensors: Sequence[Tensor], *, op: str | None = None, root: int | None = None) -> bytes:
    """The terms of an operation.

    Args:
        tensors: one for each that travels; of several, as in a coalesced call, all dtypes and sizes count.
        op: the reduction.
        root: its place in the group.
    """
    layout = " ".join(f"{tensor.dtype} {tensor.numel()}" for tensor in tensors) if len(tensors) > 1 else ""
    return _TERMS.pack(
        _DTYPES.index(str(tensors[0].dtype)) if tensors else _NO_BYTE,
        _NO_BYTE if op is None else REDUCTIONS.index(op),
        _NO_ROOT if root is None else root,
        zlib.crc32(layout.encode()),
    )


def in_words(kind: str, size: int, terms: bytes, ranks: Sequence[int]) -> str:
    """An operation as an error names it; `ranks` are the group's, by place."""
    dtype, op, root, layout = _TERMS.unpack(terms)
    parts = [] if dtype == _NO_BYTE else [_DTYPES[dtype].removeprefix("torch.")]
    if layout:
        parts.append(f"first of several tensors whose dtypes and sizes have checksum {layout:08x}")
    if op != _NO_BYTE:
        parts.append(REDUCTIONS[op])
    if root != _NO_ROOT:
        parts.append(f"root rank {ranks[root]}")
    return f"{kind} of {size} bytes" + (f" ({', '.join(parts)})" if parts else "")

"""Real text as tokens, and batches of it that do not depend on how many ranks share them.

    path               tokens
    None               bytes of the running Python's standard library, the first 4 MB of its source
    a text file        its bytes
    a folder           bytes of the text files under it, in order of their paths
    `*.bin`            uint16 token ids in this machine's byte order, as nanoGPT writes them; mapped, not read

Text is a file that decodes as UTF-8 and holds no NUL byte. A single file that is not text is an error; in a folder
such files are passed over, and so are hidden ones, `*.bin`, and whatever is no regular file.

Source: nanoGPT (`train.py`, `get_batch`) for the `.bin` format and for samples at random offsets.
Differs: an offset is a hash of (seed, step, global sample), so that W ranks together see what one process sees.
Left out: tokenizers, `.bin` files with a header, streaming, epochs without repetition.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import ConfigError, DataError
from common.seed import seed_for

STDLIB_BYTES = 4_000_000
"""How much of the standard library is read: enough for any job here, and quick."""
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_CHUNK = 1 << 20


def load_tokens(path: str | None = None) -> torch.Tensor:
    """Load a text or token file.

    Args:
        path: text file, folder of text, or `.bin` of uint16 tokens; None is the standard library's source.

    Returns:
        Token ids, 1D: uint8 for text, uint16 for `.bin`. `batch` turns what it takes into int64.

    Raises:
        DataError: nothing at `path`, unreadable, empty, not text, or a `.bin` of odd size.
    """
    if path == "":
        raise DataError("data: expected a path, found an empty name; give --data a file or folder, or leave it out")
    try:
        if path is None:
            return _load_stdlib()
        place = Path(path)
        if place.is_dir():
            return _load_folder(place)
        if not place.exists():
            raise DataError(
                f"data {path}: expected a text file, a folder of text or a .bin of tokens, found nothing there; "
                "check the path, or leave --data out for the standard library's source"
            )
        if not place.is_file():
            raise DataError(
                f"data {path}: expected a file or a folder, found a device, pipe or socket; copy it to a file"
            )
        return _load_bin(place) if _is_bin(place) else _load_text(place)
    except OSError as error:
        raise DataError(
            f"data {error.filename or path}: expected to read it, found: {error.strerror}; "
            "check the path and its permissions"
        ) from None


def check_tokens(
    tokens: torch.Tensor, vocab_size: int | None, seq: int, batch: int, *, path: str | None = None
) -> None:
    """Refuse tokens that cannot train the model: too few, or with ids that it does not have.

    Args:
        tokens: token ids, 1D.
        vocab_size: number of the model's token ids; None if unknown, which checks the length only.
        seq: tokens per sequence.
        batch: sequences per step over all ranks.
        path: where the tokens come from, for the message.

    Raises:
        DataError: fewer than `batch * seq + 1` tokens, or an id of `vocab_size` or more.
    """
    source = _name(path)
    needed = batch * seq + 1
    if len(tokens) < needed:
        raise DataError(
            f"data {source}: expected at least {needed} tokens for one batch ({batch} sequences of {seq}, and one), "
            f"found {len(tokens)}; give more text, or lower --batch or --seq"
        )
    if vocab_size is None:
        return
    largest = _largest(tokens, vocab_size)
    if largest >= vocab_size:
        raise DataError(
            f"data {source}: expected token ids below the model's vocabulary of {vocab_size}, found {largest}; "
            "give data tokenized for this model, or a model with a larger vocabulary"
        )


def batch(
    tokens: torch.Tensor, *, seed: int, step: int, batch: int, seq: int, rank: int = 0, ranks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's share of a step's batch: samples `rank * batch / ranks` up to the next rank's.

    Args:
        tokens: token ids, 1D.
        seed: decides all offsets.
        step: optimizer step, from 0.
        batch: sequences over all ranks.
        seq: tokens per sequence.
        rank: whose share.
        ranks: how many shares.

    Returns:
        Inputs and targets, both [batch / ranks, seq] int64 and contiguous; targets are the inputs one token on.

    Raises:
        ConfigError: `batch` does not divide over `ranks`, or `rank` is none of them.
        DataError: fewer than `seq + 1` tokens.
    """
    if ranks < 1 or batch % ranks or not 0 <= rank < ranks:
        raise ConfigError(
            f"batch: {batch} sequences for rank {rank} of {ranks}: shares must be equal, ranks below {ranks}"
        )
    offsets = len(tokens) - seq
    if offsets < 1:
        raise DataError(f"data: expected at least {seq + 1} tokens for one sequence, found {len(tokens)}; lower --seq")
    share = batch // ranks
    starts = (seed_for("sample", seed, step, i) % offsets for i in range(rank * share, (rank + 1) * share))
    samples = torch.stack([tokens[start : start + seq + 1].to(torch.int64) for start in starts])
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _load_stdlib() -> torch.Tensor:
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    missing = STDLIB_BYTES
    for path in _files(root):
        if path.suffix == ".py" and not _STDLIB_SKIPPED.intersection(path.relative_to(root).parts):
            parts.append(path.read_bytes()[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
    if not parts:
        raise DataError(f"data: expected the standard library's source under {root}, found none; give text with --data")
    return _byte_tokens(b"".join(parts))


def _load_folder(root: Path) -> torch.Tensor:
    parts: list[bytes] = []
    passed_over = 0
    for path in _files(root):
        data = b"" if _is_bin(path) else path.read_bytes()
        if data and _is_text(data):
            parts.append(data)
        else:
            passed_over += 1
    if not parts:
        raise DataError(
            f"data {root}: expected UTF-8 text files in the folder, found none "
            f"({passed_over} empty, .bin or not UTF-8); give a folder of text, or name one .bin file"
        )
    return _byte_tokens(b"".join(parts))


def _load_text(path: Path) -> torch.Tensor:
    data = path.read_bytes()
    if not data:
        raise DataError(f"data {path}: expected text, found an empty file; give one with text")
    if not _is_text(data):
        raise DataError(
            f"data {path}: expected UTF-8 text without NUL bytes, found other bytes; convert it (iconv -t utf-8), "
            "or name it .bin if it holds uint16 tokens"
        )
    return _byte_tokens(data)


def _load_bin(path: Path) -> torch.Tensor:
    size = path.stat().st_size
    if size == 0 or size % 2:
        found = "an empty file" if size == 0 else f"{size} bytes, an odd number"
        raise DataError(
            f"data {path}: expected uint16 tokens, two bytes each, found {found}; write it again (numpy: "
            "array.astype('uint16').tofile(path)), or give text under another name than .bin"
        )
    path.open("rb").close()  # mapping an unreadable file raises no OSError
    return torch.from_file(str(path), shared=False, size=size // 2, dtype=torch.uint16)


def _files(root: Path) -> Iterator[Path]:
    """Regular files under `root` that are not hidden, a folder's own before those of its folders, by name.

    Links to folders are not followed, since they may run in circles.
    """

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_bin(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def _is_text(data: bytes) -> bool:
    """Whether `data` is UTF-8 without NUL; decoded piece by piece, so that a large file is not held twice."""
    if b"\0" in data:
        return False
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(data)
    try:
        for start in range(0, len(data), _CHUNK):
            decoder.decode(view[start : start + _CHUNK])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _byte_tokens(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _largest(tokens: torch.Tensor, enough: int) -> int:
    """The largest id, or any bound below `enough` if the dtype alone tells; a mapped file is read in pieces."""
    if tokens.dtype in (torch.uint8, torch.uint16) and torch.iinfo(tokens.dtype).max < enough:
        return torch.iinfo(tokens.dtype).max
    return max(int(piece.to(torch.int64).max()) for piece in tokens.split(_CHUNK))


def _name(path: str | None) -> str:
    return "(standard library)" if path is None else path

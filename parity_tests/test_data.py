"""Tokens are what the files hold, batches do not depend on the number of ranks, wrong data is refused in one line."""

from __future__ import annotations

import array
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data import STDLIB_BYTES, batch, check_tokens, load_tokens
from common.errors import ConfigError, DataError
from common.seed import seed_for

COUNT = torch.arange(10_000) % 256
ROOT = Path(__file__).resolve().parents[1]


def one_line(error: pytest.ExceptionInfo[DataError]) -> None:
    assert "\n" not in str(error.value) and error.value.exit_code == 2


# --- loading ---------------------------------------------------------------------------------------------------------


def test_default_is_source_text_of_the_standard_library() -> None:
    """Without a path the tokens are whole bytes of standard modules' source, up to the limit, and of nothing else."""
    tokens = load_tokens()
    assert tokens.dtype is torch.uint8 and tokens.ndim == 1 and len(tokens) == STDLIB_BYTES
    text = bytes(tokens.tolist())
    library = Path(sysconfig.get_paths()["stdlib"])
    assert text.startswith((library / "__future__.py").read_bytes())
    for module in ("argparse.py", "ast.py"):
        assert (library / module).read_bytes() in text


def test_default_is_the_same_in_every_process() -> None:
    """Another process, with another hash seed and working directory, loads the same bytes: ranks agree."""
    script = (
        "import hashlib; from common.data import load_tokens; print(hashlib.md5(load_tokens().numpy()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "1234", "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == hashlib.md5(load_tokens().numpy().tobytes()).hexdigest()


def library_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})


def test_default_leaves_out_tests_packages_and_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `.py` files outside test and package folders count, a folder's own first, in order of their names."""
    files = {
        "b.py": "B",
        "a.py": "A",
        "z/y.py": "Y",
        "c/d/e.py": "E",
        "site-packages/x.py": "!",
        "dist-packages/x.py": "!",
        "test/x.py": "!",
        "c/tests/x.py": "!",
        "data.txt": "!",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    library_at(tmp_path, monkeypatch)
    assert bytes(load_tokens().tolist()) == b"ABEY"


def test_default_says_so_without_a_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty or missing library folder (an embedded Python) is a DataError that points at --data."""
    library_at(tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"found none; give text with --data") as error:
        load_tokens()
    one_line(error)
    library_at(tmp_path / "missing", monkeypatch)
    with pytest.raises(DataError, match=r"missing.*No such file") as error:
        load_tokens()
    one_line(error)


def test_text_file_is_its_bytes(tmp_path: Path) -> None:
    """A UTF-8 file becomes its bytes, characters of several bytes included, also across the decoder's pieces."""
    text = "x" + "é€😀" * 200_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    tokens = load_tokens(str(tmp_path / "a.txt"))
    assert tokens.dtype is torch.uint8 and bytes(tokens.tolist()) == text.encode()


def test_folder_is_its_text_files_in_order_of_paths(tmp_path: Path) -> None:
    """A folder gives its text files, then those of its folders, and passes over binary, hidden and empty ones."""
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "z.md").write_text("one ")
    (tmp_path / "a.txt").write_text("zero ")
    (tmp_path / "b" / "y").write_text("two ")
    (tmp_path / "b" / "c" / "x.py").write_text("three")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "cut.txt").write_bytes("é".encode()[:1])
    (tmp_path / "ids.bin").write_bytes(b"abcd")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_text("!")
    (tmp_path / ".git" / "config").write_text("!")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert bytes(load_tokens(str(tmp_path)).tolist()) == b"zero one two three"


@pytest.mark.parametrize("name", ["ids.bin", "IDS.BIN"])
def test_bin_file_is_uint16_tokens(tmp_path: Path, name: str) -> None:
    """A `.bin` holds one id per two bytes, up to 65535, in the machine's order, as nanoGPT's numpy writes them."""
    ids = [0, 1, 255, 256, 50_256, 65_535]
    (tmp_path / name).write_bytes(array.array("H", ids).tobytes())
    tokens = load_tokens(str(tmp_path / name))
    assert tokens.dtype is torch.uint16 and tokens.tolist() == ids
    inputs, targets = batch(tokens, seed=0, step=0, batch=1, seq=5)
    assert inputs.tolist() == [ids[:-1]] and targets.tolist() == [ids[1:]]


def test_bin_file_is_never_written(tmp_path: Path) -> None:
    """The mapping is private: writing to the tokens leaves the file alone."""
    (tmp_path / "a.bin").write_bytes(b"abcd")
    load_tokens(str(tmp_path / "a.bin")).fill_(0)
    assert (tmp_path / "a.bin").read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("odd.bin", b"abc", r"odd\.bin: expected uint16 tokens, two bytes each, found 3 bytes, an odd number"),
        ("empty.bin", b"", r"empty\.bin: expected uint16 tokens.*found an empty file"),
        ("empty.txt", b"", r"empty\.txt: expected text, found an empty file"),
        ("nul.txt", b"a\0b", r"nul\.txt: expected UTF-8 text without NUL"),
        ("latin.txt", b"caf\xe9", r"latin\.txt: expected UTF-8 text.*iconv"),
        ("cut.txt", b"caf\xc3", r"cut\.txt: expected UTF-8 text"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """A file whose content is not what its name says is a DataError that names it and the way out."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_tokens(str(tmp_path / name))
    one_line(error)


def test_wrong_places_are_refused(tmp_path: Path) -> None:
    """Nothing there, an empty name, a pipe, an empty folder, a folder of binaries: each is one line naming the path."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "binaries").mkdir()
    (tmp_path / "binaries" / "a").write_bytes(b"\0")
    (tmp_path / "binaries" / "b.bin").write_bytes(b"ab")
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("nowhere.txt", "nowhere.txt: expected a text file.*found nothing there"),
        ("pipe", "pipe: expected a file or a folder, found a device, pipe or socket"),
        ("empty", r"empty: expected UTF-8 text files in the folder, found none \(0 "),
        ("binaries", r"binaries: expected UTF-8 text files in the folder, found none \(2 "),
        ("x" * 5000, "File name too long"),
    ):
        with pytest.raises(DataError, match=message) as error:
            load_tokens(str(tmp_path / name))
        one_line(error)
    with pytest.raises(DataError, match="found an empty name"):
        load_tokens("")


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "."])
def test_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file that the system will not open is a DataError naming it, alone or in a folder, where it is not skipped."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.bin").write_text("text")

    def refuse(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for opener in ("read_bytes", "open"):
        monkeypatch.setattr(Path, opener, refuse)
    with pytest.raises(DataError, match=r"a\.\w+: expected to read it, found: Permission denied") as error:
        load_tokens(str(tmp_path / name))
    one_line(error)


def test_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder inside that may not be listed is an error: text must not go missing without a word."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"closed: expected to read it, found: Permission denied"):
        load_tokens(str(tmp_path))


# --- checking --------------------------------------------------------------------------------------------------------


def test_text_of_exactly_one_batch_is_enough() -> None:
    """batch * seq + 1 tokens pass; one fewer is a DataError with both numbers, the path and the way out."""
    check_tokens(COUNT[: 12 * 64 + 1], 256, 64, 12)
    with pytest.raises(DataError, match=r"tiny\.txt: expected at least 769 tokens .*found 768; .*--batch") as error:
        check_tokens(COUNT[: 12 * 64], 256, 64, 12, path="tiny.txt")
    one_line(error)
    with pytest.raises(DataError, match=r"standard library\): expected at least"):
        check_tokens(COUNT[:3], 256, 64, 12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
@pytest.mark.parametrize("place", [0, 1, 2**20 - 1, 2**20, 2**21 + 5])
def test_token_outside_the_vocabulary_is_found_anywhere(dtype: torch.dtype, place: int) -> None:
    """One id equal to the vocabulary size is found wherever it lies; with the next larger vocabulary it passes."""
    tokens = torch.zeros(2**21 + 6, dtype=dtype)
    tokens[place] = 200
    with pytest.raises(DataError, match=r"ids\.bin: expected token ids below .* 200, found 200; ") as error:
        check_tokens(tokens, 200, 8, 2, path="ids.bin")
    one_line(error)
    check_tokens(tokens, 201, 8, 2)
    check_tokens(tokens, None, 8, 2)


def test_ids_above_int16_are_not_mistaken() -> None:
    """uint16 ids of 32768 and more are large, not negative."""
    tokens = torch.tensor([1, 2, 40_000, 3, 4], dtype=torch.uint16)
    check_tokens(tokens, 40_001, 2, 2)
    with pytest.raises(DataError, match="found 40000"):
        check_tokens(tokens, 40_000, 2, 2)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_ranks_together_see_what_one_process_sees(ranks: int, dtype: torch.dtype) -> None:
    """The shares of all ranks, in rank order, are the batch of a single process."""
    tokens = COUNT.to(dtype)
    whole = batch(tokens, seed=3, step=5, batch=12, seq=17)
    shares = [batch(tokens, seed=3, step=5, batch=12, seq=17, rank=rank, ranks=ranks) for rank in range(ranks)]
    for part in (0, 1):
        assert all(share[part].shape == (12 // ranks, 17) for share in shares)
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


def test_batch_holds_runs_of_the_text_and_their_next_tokens() -> None:
    """Each input row is a run of the text, each target the token after it; both int64, contiguous."""
    tokens = torch.arange(1000).to(torch.uint16)
    inputs, targets = batch(tokens, seed=0, step=0, batch=8, seq=21)
    for part in (inputs, targets):
        assert part.dtype is torch.int64 and part.is_contiguous() and part.shape == (8, 21)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(21))


def test_sample_depends_on_seed_step_and_index_alone() -> None:
    """Other batch sizes and shares do not move a sample; another seed, step or index does."""
    tokens = torch.arange(1_000_000)

    def starts(**options: int) -> list[int]:
        defaults = {"seed": 1, "step": 2, "batch": 12, "seq": 8}
        return batch(tokens, **defaults | options)[0][:, 0].tolist()

    assert starts(batch=5) == starts()[:5]
    assert starts(batch=48)[:12] == starts()
    assert starts(batch=6, rank=1, ranks=2) == starts()[3:6]
    everything = [*starts(), *starts(seed=2), *starts(step=3), *starts(seed=2, step=1), *starts(seed=12, step=0)]
    assert len(set(everything)) == len(everything)


def test_every_offset_occurs_and_none_beyond_the_end() -> None:
    """Offsets run from the first token to the last that leaves room for seq + 1, each about equally often.

    2,000 draws from 20 offsets: 100 each, deviation below 10; 6 deviations are allowed.
    """
    tokens = torch.arange(25)
    starts = torch.cat([batch(tokens, seed=0, step=step, batch=20, seq=5)[0][:, 0] for step in range(100)])
    counts = torch.bincount(starts)
    assert len(counts) == 20 and (counts - 100).abs().max() < 60


def test_batch_of_the_shortest_text_is_the_text() -> None:
    """seq + 1 tokens leave one offset; one fewer is a DataError."""
    inputs, targets = batch(torch.arange(9), seed=0, step=0, batch=3, seq=8)
    assert inputs.tolist() == [list(range(8))] * 3 and targets.tolist() == [list(range(1, 9))] * 3
    with pytest.raises(DataError, match="expected at least 9 tokens for one sequence, found 8"):
        batch(torch.arange(8), seed=0, step=0, batch=3, seq=8)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 5), (2, 2), (-1, 2), (0, 0)])
def test_unequal_shares_are_refused(rank: int, ranks: int) -> None:
    """12 samples do not divide over 5 ranks, and there is no rank 2 of 2: a ConfigError, not a shorter batch."""
    with pytest.raises(ConfigError, match=f"12 sequences for rank {rank} of {ranks}"):
        batch(COUNT, seed=0, step=0, batch=12, seq=8, rank=rank, ranks=ranks)


@given(st.lists(st.integers() | st.text()), st.lists(st.integers() | st.text()))
def test_seed_depends_on_every_part(first: list[int | str], second: list[int | str]) -> None:
    """Different lists of parts have different seeds, all of them in the range of torch's generators."""
    assert 0 <= seed_for(*first) < 2**63
    assert (seed_for(*first) == seed_for(*second)) == (first == second)

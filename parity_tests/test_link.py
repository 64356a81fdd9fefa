"""The emulated link: data against direct maths, times against the formula, bits whatever the packing, and errors."""

from __future__ import annotations

import math
import os
import re
import signal
import tempfile
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.errors import ConfigError, RankError, RankTimeout
from common.harness.launch import RankPool
from common.harness.link import FREE, PRESETS, LinkChoice, LinkSpec, parse_link
from common.harness.link.board import Arena
from common.harness.link.link import Link
from common.harness.link.meter import Meter
from parity_tests import link_cases as cases

# --- what a link costs


@pytest.mark.parametrize(
    ("text", "alpha_s", "beta"),
    [
        ("1ms,150MB/s", 1e-3, 150e6),
        ("20us, 2.5 GB/s", 20e-6, 2.5e9),
        ("0,inf", 0.0, math.inf),
        ("0.5s,1MiB/s", 0.5, 2.0**20),
        ("1e-1ms,800Mb/s", 1e-4, 100e6),
        ("5ns,10Gbit/s", 5e-9, 1.25e9),
    ],
)
def test_link_reads_latency_and_bandwidth(text: str, alpha_s: float, beta: float) -> None:
    """A time and a rate, in the usual units; b is bits and B is bytes."""
    spec = parse_link(text).of_group([0, 1])
    assert (spec.alpha_s, spec.beta_bytes_per_s) == (pytest.approx(alpha_s, rel=1e-12), pytest.approx(beta, rel=1e-12))


@pytest.mark.parametrize("text", ["", "1ms", "1ms,150MB", "1,150MB/s", "-1ms,1MB/s", "1ms,0B/s", "fast", "nodes:0"])
def test_link_refuses_what_it_cannot_read(text: str) -> None:
    """Anything else is an error of one line that shows how to write it."""
    with pytest.raises(ConfigError, match=r"(?s)^(?!.*\n).*write") as caught:
        parse_link(text)
    assert caught.value.exit_code == 2


def test_link_presets_say_what_they_are() -> None:
    """Each preset has its name and a sentence, and those that imitate hardware say that it is a ratio and no GPU."""
    untouched = {"gloo", "nccl", "fake"}
    assert {*untouched, "none", "nvlink", "pcie", "ethernet", "nodes"} == set(PRESETS)
    for name, choice in PRESETS.items():
        assert parse_link(name) is choice
        assert (choice.across is None) is (name in untouched)
        assert name in (*untouched, "none") or ("ratio" in choice.about and "not a GPU" in choice.about)
    assert parse_link("none").of_group([0, 1]) == FREE
    assert parse_link("1ms,150MB/s").describe() == "1ms per operation and 150MB/s per rank", "its name is its cost"
    assert parse_link("pcie").describe().startswith(f"{PRESETS['pcie'].across}; "), "of a preset the cost is told"
    assert FREE.cost_s(10**9, 4) == 0.0
    rates = [parse_link(name).of_group([0, 1]).beta_bytes_per_s for name in ("nvlink", "pcie", "ethernet")]
    assert all(fast > slow for fast, slow in pairwise(rates))


def test_link_of_a_group_depends_on_the_nodes_it_spans() -> None:
    """With nodes of N ranks, a group inside one has the fast link and one that crosses nodes the slow one."""
    choice = parse_link("nodes:3")
    fast, slow = parse_link("nvlink").across, parse_link("ethernet").across
    assert [choice.of_group(ranks) for ranks in ([0, 1, 2], [3, 5], [2, 3], [0, 3])] == [fast, fast, slow, slow]
    assert isinstance(choice, LinkChoice)


def test_arena_gives_out_no_byte_twice() -> None:
    """What is live lies apart, filled to the brim; an arena with nothing live has room for all of its size."""
    arena, live = Arena(1 << 14), []
    generator = torch.Generator().manual_seed(0)
    for number in range(3000):
        size = 64 * int(torch.randint(1, 256, (), generator=generator) ** 2 // 256 + 1)
        while (offset := arena.take(size, number, live[0][0] if live else number)) is None:
            assert live
            live.pop(0)
        assert 0 <= offset <= (1 << 14) - size
        assert all(offset + size <= other or other + length <= offset for _, other, length in live)
        live.append((number, offset, size))


# --- data


@pytest.mark.parametrize(("ranks", "seed"), [(1, 1), (2, 2), (3, 3)])
def test_link_data_is_what_maths_says(pool: RankPool, ranks: int, seed: int) -> None:
    """1000 random collectives per rank: all kinds, dtypes and reductions, bit for bit.

    In and out of place, with gaps, empty, larger than the shared memory at first, waited for out of order or never.
    """
    for wrong, kinds in pool.run(cases.random_operations, seed, 1000, ranks=ranks, timeout_s=120):
        assert wrong == []
        assert kinds == 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [3, 4])
def test_link_packing_changes_no_bit(pool: RankPool, ranks: int, dtype: torch.dtype) -> None:
    """Gradients reduced in one message laid out by rank have the bits of each reduced alone."""
    assert pool.run(cases.packed_and_in_pieces, dtype, ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize("changes", [{}, {"param_dtype": "bf16", "reduce_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_link_engine_equals_torch_fully_shard_bitwise(pool: RankPool, changes: dict[str, Any]) -> None:
    """Over the link, at 3 ranks, the eager engine with native sums has the bits of torch's fully_shard."""
    for differences, kinds in pool.run(cases.engine_against_torch, changes, ranks=3):
        assert differences == []
        assert kinds >= {"all_gather", "reduce_scatter"}


def test_link_compiled_engine_equals_torch_fully_shard_bitwise(pool: RankPool) -> None:
    """The same for the compiled engine (`aot_eager`), whose graph calls functional collectives."""
    for differences, kinds in pool.run(cases.compiled_against_torch, ranks=3, timeout_s=120):
        assert differences == []
        assert kinds >= {"all_gather", "reduce_scatter"}


def test_link_native_sums_are_ordered_sums(pool: RankPool) -> None:
    """Over the link the native reduce-scatter adds in rank order: at 3 ranks it has the ordered transport's bits."""
    assert pool.run(cases.native_against_ordered, ranks=3) == [[]] * 3


# --- times


def wire_bytes(kind: str, size: int, ranks: int) -> int | None:
    """What a ring moves per rank; None where shares are uneven."""
    full = {
        "all_gather": size * (ranks - 1) // ranks,
        "reduce_scatter": size * (ranks - 1) // ranks,
        "all_reduce": 2 * size * (ranks - 1) // ranks,
        "gather": size * (ranks - 1) // ranks,
        "scatter": size * (ranks - 1) // ranks,
    }
    return None if kind == "all_to_all" else full.get(kind, size)


def test_link_times_are_those_of_the_model(pool: RankPool) -> None:
    """Every start and end follows, to the last bit, from the issue times of all ranks and the formula.

    No wait returns before its operation's end, and what a rank slept is no more than the whole took.
    """
    spec, ranks = LinkSpec(300e-6, 40e6), 3
    logs, exposed, wholes, early = zip(*pool.run(cases.timed_operations, spec, 200, ranks=ranks), strict=True)
    assert early == ([],) * ranks
    free_s = 0.0
    for number, entries in enumerate(zip(*logs, strict=True)):
        first = entries[0]
        assert {(e.index, e.kind, e.start_s, e.end_s, e.wire_bytes) for e in entries} == {
            (number, first.kind, first.start_s, first.end_s, first.wire_bytes)
        }
        expected = wire_bytes(first.kind, first.bytes, ranks)
        assert expected is None or first.wire_bytes == expected
        start_s = max(free_s, *(entry.issue_s for entry in entries))
        free_s = start_s + (spec.alpha_s + first.wire_bytes / spec.beta_bytes_per_s)
        assert (first.start_s, first.end_s) == (start_s, free_s)
    assert len(logs[0]) == 200
    for slept_s, whole_s in zip(exposed, wholes, strict=True):
        assert 0 < slept_s <= whole_s


def test_link_groups_of_a_mesh_are_links_of_their_own(pool: RankPool) -> None:
    """On 2 nodes of 2 ranks the groups across nodes are slower than those inside, and each has its own log entries."""
    nvlink, ethernet = (parse_link(name).of_group([0, 1]) for name in ("nvlink", "ethernet"))
    for rank, log in enumerate(pool.run(cases.mesh_links, ranks=4)):
        across, inside = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert [(ranks, kind) for ranks, kind, _ in log] == [
            (ranks, kind) for ranks in (across, inside) for kind in ("all_reduce", "all_gather")
        ]
        expected = [spec.cost_s(wire, 2) for spec in (ethernet, nvlink) for wire in (4000, 2000)]
        assert [seconds for *_, seconds in log] == pytest.approx(expected, abs=1e-9)


# --- DDP


@pytest.mark.parametrize(
    ("hook", "options", "nested"),
    [
        (False, {}, False),
        (True, {}, False),
        (False, {"static_graph": True}, False),
        (False, {"find_unused_parameters": True}, False),
        (False, {}, True),
    ],
    ids=["plain", "fp16-hook", "static-graph", "unused", "checkpoint"],
)
def test_link_carries_ddp(pool: RankPool, hook: bool, options: dict[str, Any], nested: bool) -> None:
    """Three steps of DistributedDataParallel give gloo's gradients, bit for bit: at 2 ranks order cannot differ."""
    with_gloo = pool.run(cases.ddp_steps, "gloo", hook, options, nested, ranks=2)
    over_link = pool.run(cases.ddp_steps, "0.1ms,1GB/s", hook, options, nested, ranks=2)
    for (expected, none), (found, reduced) in zip(with_gloo, over_link, strict=True):
        assert none == 0
        assert reduced >= 5
        assert len(expected) == 18
        assert all(map(torch.equal, found, expected))


def test_link_carries_the_divide_factor_of_fully_shard(pool: RankPool) -> None:
    """FSDP2 has each rank's gradient divided by its factor, and then summed, unless that is the number of ranks."""
    for found, expected in pool.run(cases.divided_by_fully_shard, 3.0, ranks=2):
        assert torch.equal(found, expected)


# --- what goes wrong


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("send", r"^EngineError: .*recv.*--link gloo", r"^EngineError: .*send.*--link gloo"),
        ("mean", r"^EngineError: .*mean of torch.int64", r"^EngineError: .*mean of torch.int64"),
        ("premultiplied", r"^EngineError: .*found torch.int64", r"^EngineError: .*found torch.int64"),
        ("mismatch", r"^EngineError: operation 2 .*broadcast of 16 .*all_reduce of 16", r"^EngineError"),
        ("sizes", r"^EngineError: operation 2 .*all_reduce of 16 .*, rank 1 all_reduce of 20", r"^EngineError"),
        ("late", r"^RankTimeout: all_reduce, operation 2 .*rank 1 did not join within 0.5 s", r""),
        ("left", r"^RankError: all_reduce, operation 2 .*rank 1 is gone", r"^EngineError: left"),
    ],
)
def test_link_error_names_operation_and_rank(pool: RankPool, what: str, first: str, second: str) -> None:
    """What cannot be carried, ranks that disagree, and one that is late or gone: each a clear error, at once."""
    found = pool.run(cases.errors_of, what, ranks=2)
    for text, pattern in zip(found, (first, second), strict=True):
        assert re.match(pattern, text), text


def test_link_error_names_the_terms_on_which_ranks_disagree(pool: RankPool) -> None:
    """Of one kind and size, another root, reduction, dtype or split is an error on both ranks that names both calls.

    The error is caught inside the link; leaving it then raises nothing else.
    """
    ours, theirs = pool.run(cases.disagreements, ranks=2)
    roots = r"\(float32, {}root rank 0\), rank 1 .*\(float32, {}root rank 1\)"
    expected = {
        "broadcast": "broadcast of 16 bytes " + roots.format("", ""),
        "reduce": "reduce of 16 bytes " + roots.format("SUM, ", "SUM, "),
        "gather": "gather of 32 bytes " + roots.format("", ""),
        "scatter": "scatter of 32 bytes " + roots.format("", ""),
        "reduction": r"all_reduce of 16 bytes \(float32, SUM\), rank 1 all_reduce of 16 bytes \(float32, MAX\)",
        "dtype": r"all_reduce of 16 bytes \(float32, SUM\), rank 1 all_reduce of 16 bytes \(int32, SUM\)",
        "exchange": r"all_to_all of 16 bytes \(float32\), rank 1 all_to_all of 16 bytes \(int32\)",
        "splits": r"all_gather of 32 bytes \(float32, first of several .* (\w+)\), rank 1 .*several .* (?!\1)\w+\)",
    }
    assert ours.keys() == theirs.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.match(r"EngineError: operation 0 on group .*: rank 0 issued " + pattern, ours[name]), ours[name]
        assert theirs[name] == ours[name]


def test_link_refuses_to_write_where_elements_share_memory(pool: RankPool) -> None:
    """Every collective that writes refuses such a tensor on every rank, with the way out, before anything is sent.

    Strides that interleave without meeting are no such case: their sum is right.
    """
    for texts, total in pool.run(cases.shared_elements, ranks=2):
        assert len(texts) == 20
        for name, text in texts.items():
            kind, strides = name.split()[0].strip(","), r"\[4\] with strides \[0\]" if "exp" in name else r"\[1, 1\]"
            assert re.match(rf"EngineError: link: {kind}: .*{strides}.*\.contiguous\(\)$", text), (name, text)
        assert total.tolist() == [[0.0, 6.0], [4.0, 10.0], [8.0, 14.0]]


@pytest.mark.parametrize("is_reused", [False, True], ids=["closed", "reused"])
@pytest.mark.parametrize("is_connected", [False, True], ids=["unseen", "seen"])
def test_link_tells_a_slow_rank_why_the_other_left(pool: RankPool, is_connected: bool, is_reused: bool) -> None:
    """A rank that comes to a link which failed is told of the disagreement, and reads nothing that is not the link's.

    The other rank has caught its error, left, and closed its memory, with an earlier operation not yet taken in here.
    """
    (first, _), (second, data) = pool.run(cases.left_behind, is_connected, is_reused, ranks=2)
    assert re.match(r"EngineError: operation \d .*rank 0 issued all_reduce of 20 .*rank 1 broadcast of 20", first), (
        first
    )
    assert second == first
    assert data == [1.0] * 4


def test_link_failure_that_was_caught_is_the_only_error(pool: RankPool) -> None:
    """After one link has failed, leaving does not wait for the operations of another that ranks no longer share."""
    for text in pool.run(cases.failure_beside, ranks=2):
        assert re.match(r"EngineError: operation 0 .*root rank 0\), rank 1 broadcast.*root rank 1", text), text


def test_link_leaves_nothing_behind(pool: RankPool) -> None:
    """After the context gloo carries again, and no file, mapping or name of the link's is left in a rank."""
    before = sorted(os.listdir("/dev/shm"))
    for left, inside, logged in pool.run(cases.what_stays, ranks=2):
        assert left == []
        assert inside > 0
        assert logged == 0
    assert sorted(os.listdir("/dev/shm")) == before


def test_link_leaves_nothing_behind_when_a_rank_dies(pool: RankPool) -> None:
    """A rank that ends its process in mid-link is named, and nothing of the link's has a name in shared memory."""
    with pytest.raises(RankError, match="rank 1 ended with exit code 7"):
        pool.run(cases.die, ranks=2)
    assert not [name for name in os.listdir("/dev/shm") if "fsdp-link" in name]


def test_link_wait_is_told_from_a_hang(pool: RankPool) -> None:
    """When the pool's time is up, the rank that hangs is blamed, and the one in the link's wait is waiting for it."""
    pool.run(cases.what_stays, ranks=2)  # ranks that are new have imported what they need
    with pytest.raises(RankTimeout, match=r"rank 1 at hang .*waiting for it: rank 0 in all_reduce at hang "):
        pool.run(cases.hang, ranks=2, timeout_s=5)


def test_link_finds_a_dead_peer_at_once() -> None:
    """Waiting for a process that has ended fails by its rank's name, long before the timeout."""
    with tempfile.TemporaryDirectory() as folder:

        def link(rank: int) -> Link:
            store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
            return Link(
                group="pair",
                ranks=[4, 6],
                rank=rank,
                store=store,
                spec=FREE,
                meter=Meter(),
                timeout_s=600,
                arena_bytes=1 << 12,
            )

        child = os.fork()
        if child == 0:
            link(1).issue("barrier", size=0, wire=0, payload=[], receive=lambda payloads: None)
            signal.pause()
        ours = link(0)
        ours.finish(ours.issue("barrier", size=0, wire=0, payload=[], receive=lambda payloads: None))
        os.kill(child, 9)
        with pytest.raises(RankError, match=r"barrier, operation 1 on group 'pair' \(ranks 4, 6\): rank 6 is gone"):
            ours.finish(ours.issue("barrier", size=0, wire=0, payload=[], receive=lambda payloads: None))
        ours.close()
        os.waitpid(child, 0)

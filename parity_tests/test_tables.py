"""Tables: what their rows are, from records that are stored or changed."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bench import tables, views
from bench.judge import judged_pairs, needs_referee
from bench.store import Comparison
from common.harness.memory_record import StepMemory
from common.harness.records import CollectiveCount
from common.job import JobConfig
from parity_tests.test_render import ENGINES, stored


def test_worst_parameter_is_the_one_nearest_its_limit(frozen: Comparison) -> None:
    """Not the largest error, but the largest share of the limit; none where all bits are equal."""
    table = tables.gradient_table(frozen.reports)
    for row, report in zip(table.to_dict(orient="records"), stored("report")["comparisons"], strict=True):
        unequal = {each["name"]: each for each in report["params"] if not each["bitwise"]}
        assert row["params_bitwise"] == 3 - len(unequal)
        shares = {
            name: max(
                each["candidate_error"] / each["limit"],
                each["candidate_row_error"] / each["row_limit"],
            )
            for name, each in unequal.items()
        }
        assert row["worst_param"] == max(shares, key=shares.__getitem__, default=None)
        assert row["error"] == (unequal[row["worst_param"]]["candidate_error"] if unequal else None)
    report = frozen.reports[1]
    tight = replace(report.params[2], candidate_error=1e-9, limit=1.01e-9, bitwise=False)
    row_off = replace(report.params[2], candidate_row_error=3.0, row_limit=1.0, bitwise=False)
    lost = replace(report.params[0], candidate_error=math.nan, bitwise=False)
    (row,) = tables.gradient_table([replace(report, params=(*report.params[:2], tight))]).to_dict(orient="records")
    assert row["worst_param"] == tight.name
    (row,) = tables.gradient_table([replace(report, params=(*report.params[:2], row_off))]).to_dict(orient="records")
    assert row["worst_param"] == row_off.name
    for params in ((lost, tight), (tight, lost)):
        (row,) = tables.gradient_table([replace(report, params=params)]).to_dict(orient="records")
        assert row["worst_param"] == lost.name


def test_collective_table_pairs_counts_with_predictions(frozen: Comparison) -> None:
    """An operation only counted, only predicted, off in bytes alone, and an engine without a formula."""
    record = replace(
        frozen.records["eager"],
        collectives=[CollectiveCount("forward", "all_gather", 2, 100), CollectiveCount("forward", "broadcast", 1, 8)],
        predicted=[CollectiveCount("forward", "all_gather", 2, 104), CollectiveCount("backward", "all_gather", 2, 104)],
    )
    table = tables.collective_table({"eager": record, "ddp": replace(record, predicted=None)}, {})
    rows = [tuple(row.values())[1:-4] for row in table.to_dict(orient="records")]
    assert rows == [
        ("forward", "all_gather", 2, 100, 2, 104, False),
        ("forward", "broadcast", 1, 8, 0, 0, False),
        ("backward", "all_gather", 0, 0, 2, 104, False),
        ("forward", "all_gather", 2, 100, None, None, None),
        ("forward", "broadcast", 1, 8, None, None, None),
    ]


def test_memory_is_the_most_of_any_rank(frozen: Comparison) -> None:
    """Start and peak are taken over ranks; the referee's memory is nobody's question."""
    ranks = stored("eager")["memory"]
    ranks[1]["peak_bytes"] += 7
    memory = [StepMemory.from_dict(rank) for rank in ranks]
    table = tables.memory_table({**frozen.records, "eager": replace(frozen.records["eager"], memory=memory)}, {})
    assert table["engine"].tolist() == ENGINES[:-1]
    (row,) = table[table["engine"] == "eager"].to_dict(orient="records")
    assert (row["ranks"], row["start_bytes"], row["peak_bytes"]) == (2, ranks[1]["start_bytes"], ranks[1]["peak_bytes"])
    assert row["step_bytes"] == ranks[1]["peak_bytes"] - ranks[1]["start_bytes"]


@given(st.integers(1, 5000))
def test_shown_steps_hold_the_first_and_the_last(steps: int) -> None:
    """Steps rise, are no more than a table has room for, and are all of a short run."""
    shown = views.shown_steps(steps)
    assert shown[0] == 0 and shown[-1] == steps - 1
    assert shown == sorted(set(shown)) and len(shown) == min(steps, views.MAX_STEPS)


def test_sizes_have_the_unit_that_suits_them(frozen: Comparison) -> None:
    """Decimal units, as in the predicted column of a paper; bytes are whole."""
    sizes = [0, 999, 1000, 336_000, 1_940_488, 32_121_044_992, 7 * 10**15]
    others = {
        "engine": "e",
        "ranks": 1,
        "peak_bytes": 0,
        "step_bytes": None,
        "active_bytes": None,
        "reserved_bytes": None,
    }
    others |= tables.grade_of(None)
    rows = [{**others, "start_bytes": size} for size in sizes]
    table = tables.frame(rows, list(rows[0]))
    shown = views.view_memory(table)["at start"].tolist()
    assert shown == ["0 B", "999 B", "1.00 kB", "336.00 kB", "1.94 MB", "32.12 GB", "7000.00 TB"]


def test_judged_pairs_hold_the_main_one_and_all_that_can_be_bitwise() -> None:
    """Each candidate against the reference, compiled against eager first of all, and equal bits where they are due."""
    four = ("eager", "compiled", "torch-fsdp2", "ddp")
    against_single = [("single", name) for name in four]
    inductor, traced = JobConfig(), JobConfig(backend="aot_eager")
    bitwise = [("torch-fsdp2", "eager")]
    assert judged_pairs(inductor, "single", four) == [("eager", "compiled"), *against_single, *bitwise]
    bitwise.append(("torch-fsdp2", "compiled"))
    assert judged_pairs(traced, "single", four) == [("eager", "compiled"), *against_single, *bitwise]
    three_ranks = JobConfig(ranks=3, backend="aot_eager")  # torch's FSDP sums in gloo's order, ours in rank order
    assert judged_pairs(three_ranks, "single", four) == [("eager", "compiled"), *against_single]
    assert judged_pairs(inductor, "single", ("compiled", "eager"))[0] == ("eager", "compiled")
    assert judged_pairs(inductor, "eager", ("compiled",)) == [("eager", "compiled")]
    paths = ("fsdp_compiled.parallelize", "fsdp_eager.parallelize")
    assert judged_pairs(inductor, "ddp", paths)[0] == (paths[1], paths[0])
    assert needs_referee(inductor, [("eager", "compiled")]) and not needs_referee(traced, [("eager", "compiled")])

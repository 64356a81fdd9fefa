"""A step, walked on two sides, parts at the first place that is wrong; compiled, at the stage that makes it so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from bench.explain import Explanation, explain
from bench.explanation_tables import explanation_document
from bench.stages import INDUCTOR, TRACED, UNCOMPILED, Bisection, StageRow, bisect, stage_jobs
from common.harness.compare import compare_runs
from common.harness.divergence import Finding, PlaceRow, compare_walks, describe_elements
from common.harness.grades import ErrorBound, Grade
from common.harness.instruments.walk import Phase, Place, Walk, What
from common.harness.joining import UNJOINED
from common.harness.launch import RankPool
from common.harness.records import json_ready
from common.harness.replay import replay, walkable
from common.job import PASSES, JobConfig
from parity_tests.cli_calls import FROZEN, call
from parity_tests.engines import broken_pass, flipping_later, narrowing
from parity_tests.runs import Runs

JOB = JobConfig(model="llama-debug,n_layers=1", steps=2, batch=4, seq=16, backend="aot_eager", lr=0.01)
BOUND = ErrorBound.of(Grade.REDUCTION_ORDER, JOB, reference_ranks=1, candidate_ranks=2)
OUTPUT = Place(Phase.FORWARD, What.OUTPUT, "layer")
LATER = Place(Phase.FORWARD, What.OUTPUT, "later")
OUTPUT_GRADIENT = Place(Phase.BACKWARD, What.OUTPUT_GRADIENT, "layer")
LOCAL_GRADIENT = Place(Phase.BACKWARD, What.LOCAL_GRADIENT, "layer.weight")
GRADIENT = Place(Phase.GRADIENT, What.GRADIENT, "layer.weight")
READ = Place(Phase.FORWARD, What.READ, "layer.weight")
ROWS = torch.arange(1.0, 13.0).view(4, 3)
ROUNDED = torch.nextafter(ROWS, 2 * ROWS)


# Ranks against one process


def test_a_walk_of_ranks_is_put_together_to_one_of_one_process() -> None:
    """Rows of outputs follow each other, their gradients are W times as large, local gradients have the mean."""
    one: Walk = {OUTPUT: ROWS, OUTPUT_GRADIENT: ROWS, LOCAL_GRADIENT: ROWS, GRADIENT: ROWS, READ: ROWS}
    ranks: list[Walk] = [
        {OUTPUT: half, OUTPUT_GRADIENT: 2 * half, LOCAL_GRADIENT: ROWS + shift, GRADIENT: ROWS, READ: ROWS}
        for half, shift in ((ROWS[:2], -1), (ROWS[2:], 1))
    ]
    divergence = compare_walks([one], ranks, _double(one), BOUND)
    assert divergence.finding is None
    assert [row.differing for row in divergence.rows] == [0] * 5
    assert all(row.candidate_error == 0 for row in divergence.rows)


def test_ranks_are_laid_beside_ranks() -> None:
    """Of as many ranks on both sides, each is compared with its own like: what cancels in the mean is seen."""
    honest: list[Walk] = [{LOCAL_GRADIENT: ROWS}, {LOCAL_GRADIENT: ROWS}]
    swapped: list[Walk] = [{LOCAL_GRADIENT: ROWS - 1}, {LOCAL_GRADIENT: ROWS + 1}]
    finding = compare_walks(honest, swapped, None, BOUND, bitwise=True).finding
    assert finding is not None and finding.row.differing == 24
    one_sided = compare_walks(honest, [honest[0], swapped[1]], None, BOUND, bitwise=True).finding
    assert one_sided is not None and one_sided.where == "12 of 24 elements, on rank 1 only"
    assert (one_sided.index[0], one_sided.reference_value, one_sided.candidate_value) == (1, 1.0, 2.0)


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_are_put_together_where_their_batch_is(dim: int) -> None:
    """In the first dimension or another one; a wrong element of one rank is found either way."""
    rows = ROWS if dim == 0 else ROWS.T
    one: Walk = {OUTPUT: rows, OUTPUT_GRADIENT: rows}
    ranks: list[Walk] = [{OUTPUT: half, OUTPUT_GRADIENT: 2 * half} for half in rows.tensor_split(2, dim)]
    assert compare_walks([one], ranks, _double(one), BOUND, bitwise=True).finding is None
    ranks[1][OUTPUT] = ranks[1][OUTPUT] + 1
    finding = compare_walks([one], ranks, _double(one), BOUND).finding
    assert finding is not None and finding.row.place == "forward: output of 'layer'"


def test_an_output_that_holds_nothing_of_the_batch_is_the_same_on_all_ranks() -> None:
    """Such as that of a table of positions; its gradient is the mean over ranks, and an output that is off is seen."""
    one: Walk = {OUTPUT: ROWS, OUTPUT_GRADIENT: ROWS}
    ranks: list[Walk] = [{OUTPUT: ROWS, OUTPUT_GRADIENT: factor * ROWS} for factor in (0.5, 1.5)]
    assert compare_walks([one], ranks, _double(one), BOUND, bitwise=True).finding is None
    for rank in ranks:
        rank[OUTPUT] = ROWS + 1
    finding = compare_walks([one], ranks, _double(one), BOUND).finding
    assert finding is not None and finding.breaks_promise and finding.row.place == "forward: output of 'layer'"
    assert finding.where == "all 12 elements"


@pytest.mark.parametrize("shape", [(), (3,), (1, 5), (2, 5)])
def test_what_a_rank_makes_of_its_own_rows_is_no_finding(shape: tuple[int, ...]) -> None:
    """Such as a loss beside the loss or a mean over the batch, of whatever size; other places tell of what is wrong."""
    one: Walk = {OUTPUT: torch.ones(1, 5) if len(shape) == 2 else torch.ones(shape), LATER: ROWS}
    halves = zip((0.5, 1.5), ROWS.tensor_split(2), strict=True)
    ranks: list[Walk] = [{OUTPUT: torch.full(shape, mean), LATER: half} for mean, half in halves]
    divergence = compare_walks([one], ranks, _double(one), BOUND)
    assert divergence.finding is None
    assert divergence.rows[0].note == UNJOINED and not divergence.rows[0].is_astray


def test_what_all_ranks_should_have_alike_is_looked_at_on_each() -> None:
    """A parameter that rank 1 alone reads wrongly is wrong, also where one process has nothing to lay beside rank 1."""
    one: Walk = {READ: ROWS, OUTPUT: ROWS}
    ranks: list[Walk] = [{READ: ROWS + rank, OUTPUT: half} for rank, half in enumerate(ROWS.tensor_split(2))]
    finding = compare_walks([one], ranks, _double(one), BOUND).finding
    assert finding is not None and finding.breaks_promise and finding.row.what is What.READ
    assert not any("mean" in cause for cause in finding.causes), "no gradient's cause for what is none"


def test_rows_are_those_of_the_dimension_in_which_the_batch_is() -> None:
    """Where batch comes second, ranks own slices of that dimension."""
    one: Walk = {OUTPUT: ROWS.T}
    ranks: list[Walk] = [{OUTPUT: half} for half in ROWS.T.tensor_split(2, 1)]
    ranks[1][OUTPUT] = ranks[1][OUTPUT] + 1
    finding = compare_walks([one], ranks, _double(one), BOUND).finding
    assert finding is not None
    assert finding.where == "6 of 12 elements, in 2 of 4 slices of dimension 1 (2-3), all of the batch of rank 1"


# What is found


def test_the_first_place_out_of_proportion_is_found_behind_rounding() -> None:
    """Where sums may have another order, bits that differ by rounding are passed by; the fault behind them is named."""
    one: Walk = {OUTPUT: ROWS, LATER: ROWS, GRADIENT: ROWS}
    other: Walk = {OUTPUT: ROUNDED, LATER: ROWS + 0.5, GRADIENT: 2 * ROWS}
    finding = compare_walks([one], [other], _double(one), BOUND).finding
    assert finding is not None and finding.breaks_promise
    assert finding.row.place == "forward: output of 'later'"


def test_where_bits_were_asked_the_first_bit_is_found() -> None:
    """One rounding is a divergence where equal bits are promised."""
    one: Walk = {OUTPUT: ROWS, LATER: ROWS}
    other: Walk = {OUTPUT: ROUNDED, LATER: ROWS + 0.5}
    finding = compare_walks([one], [other], _double(one), BOUND, bitwise=True).finding
    assert finding is not None and finding.breaks_promise
    assert (finding.row.place, finding.row.max_ulp) == ("forward: output of 'layer'", 1)


def test_rounding_alone_is_called_that() -> None:
    """Bits that differ within the bound everywhere are no divergence, and the cause says so."""
    one: Walk = {OUTPUT: ROWS}
    finding = compare_walks([one], [{OUTPUT: ROUNDED}], _double(one), BOUND).finding
    assert finding is not None and not finding.breaks_promise
    assert "rounding" in finding.causes[0]


def test_a_place_that_one_side_lacks_is_a_divergence() -> None:
    """A frozen parameter that trains, or one that never does, differs by having a gradient or none."""
    one: Walk = {OUTPUT: ROWS, GRADIENT: ROWS}
    for reference, candidate, side in ((one, {OUTPUT: ROWS}, "candidate"), ({OUTPUT: ROWS}, one, "reference")):
        finding = compare_walks([reference], [candidate], None, BOUND).finding
        assert finding is not None and finding.breaks_promise
        assert finding.where == f"the {side} has none"
        assert finding.row.place == "gradient: gradient of 'layer.weight'"


def test_other_shapes_and_what_is_no_number_are_divergences() -> None:
    """Neither can be excused by rounding."""
    one: Walk = {OUTPUT: ROWS}
    finding = compare_walks([one], [{OUTPUT: ROWS.T}], _double(one), BOUND).finding
    assert finding is not None and finding.where == "expected shape [4, 3], found [3, 4]"
    spoiled = ROWS.clone()
    spoiled[2, 1] = torch.nan
    finding = compare_walks([one], [{OUTPUT: spoiled}], _double(one), BOUND).finding
    assert finding is not None and finding.breaks_promise and finding.index == (2, 1)


ONE_ROW = "2 of 14 elements, in 1 of 7 rows ({}), all of the shards"


@pytest.mark.parametrize(
    ("rows", "what", "ranks", "expected"),
    [
        (range(7), What.GRADIENT, 2, "all 14 elements"),
        ([0, 1, 4], What.GRADIENT, 2, "6 of 14 elements, in 3 of 7 rows (0-1, 4)"),
        ([1], What.GRADIENT, 2, f"{ONE_ROW.format(1)} of rank 0"),
        ([5], What.GRADIENT, 2, f"{ONE_ROW.format(5)} of rank 1, whose shard is padded"),
        ([6], What.GRADIENT, 3, f"{ONE_ROW.format(6)} of rank 2, whose shard is padded"),
        ([], What.GRADIENT, 2, "no element"),
    ],
)
def test_elements_are_told_by_rows_and_ranks(rows: Sequence[int], what: What, ranks: int, expected: str) -> None:
    """A rank has ceil(rows / W) rows; of seven the last chunk has padding, at two ranks and at three."""
    marked = torch.zeros(7, 2, dtype=torch.bool)
    marked[list(rows)] = True
    assert describe_elements(marked, Place(Phase.GRADIENT, what, "weight"), ranks) == expected


# Through ranks


def test_engines_that_are_equal_are_equal_at_every_place(pool: RankPool) -> None:
    """Eager, and the compiled engine without its compiler, agree in bits of all they read, make and reduce."""
    walks = {
        engine: replay(pool, engine, walkable(engine, JOB), 1, timeout_s=120).walks for engine in ("eager", "compiled")
    }
    divergence = compare_walks(walks["eager"], walks["compiled"], None, BOUND, bitwise=True)
    assert divergence.finding is None
    params, modules = 12, 1 + 1 + 12 + 2  # the model, embedding, a block of 12, norm and output
    by_what = [row.what for row in divergence.rows]
    assert {what: by_what.count(what) for what in dict.fromkeys(by_what)} == {
        What.PARAMETER: 2 * params,
        What.BATCH: 2,
        What.READ: params,
        What.OUTPUT: modules,
        What.LOSS: 1,
        What.OUTPUT_GRADIENT: modules,
        What.LOCAL_GRADIENT: params,
        What.GRADIENT: params,
    }


def test_a_replay_is_what_was_recorded(pool: RankPool, runs: Runs) -> None:
    """Step 1 of a replay has the loss and the gradients of step 1 of the run, in bits."""
    record, _ = runs("eager", JOB)
    replayed = replay(pool, "eager", JOB, 1, timeout_s=120)
    assert list(replayed.losses) == record.losses[1]
    assert replayed.digests == record.grad_digests[1]


def _explained(pool: RankPool, runs: Runs, reference: str, candidate: str, job: JobConfig = JOB) -> Explanation:
    sides = runs(reference, job), runs(candidate, job)
    report = compare_runs(*sides, runs.referee(job))
    return explain(pool, job, report, [record for record, _ in sides], 120)


def test_a_sum_in_the_place_of_a_mean_is_found_at_the_reduction(pool: RankPool, runs: Runs) -> None:
    """Each rank's own gradient agrees, the whole one is W times the mean."""
    found = _explained(pool, runs, "single", "parity_tests.engines.summing", replace(JOB, backend="eager"))
    assert found.finding is not None
    assert found.finding.row.place == "gradient: gradient of 'output.weight'"
    assert "summed over ranks" in found.finding.causes[0]
    assert "the reduction" in found.finding.causes[1]


def test_a_narrowed_input_is_found_at_its_module(pool: RankPool, runs: Runs) -> None:
    """Of all places that are astray the one module is named that was given other numbers."""
    found = _explained(pool, runs, "single", narrowing.__name__, replace(JOB, backend="eager"))
    assert found.finding is not None
    assert found.finding.row.place == f"forward: output of {narrowing.TARGET!r}"
    assert found.bisection is None


def test_what_goes_wrong_later_is_found_in_its_step(pool: RankPool, runs: Runs) -> None:
    """Rounding differs from step 0 on; what is named is the first step, and place in it, that is out of proportion."""
    job = replace(JOB, backend="eager", steps=5, lr=0.1)
    found = _explained(pool, runs, "single", flipping_later.__name__, job)
    assert found.finding is not None and found.finding.breaks_promise
    assert (found.step, found.finding.row.place) == (1, f"gradient: gradient of {flipping_later.TARGET!r}")


def test_the_title_names_the_stage_that_changes_bits() -> None:
    """A walk of the uncompiled engine finds nothing where the compiler rounds in another order."""
    same = StageRow("uncompiled", "compiler", "bitwise", None, True, 0, 8, 1, None)
    changing = replace(same, stage=INDUCTOR, params_differ=30)
    bisection = Bisection("compiled", "eager", False, (same, changing))
    row = PlaceRow(**{field.name: None for field in fields(PlaceRow)})
    found = Explanation("eager", "compiled", 0, "compiler", True, (row,), None, bisection)
    assert "the stage inductor brings in" in explanation_document(found).title
    noted = explanation_document(replace(found, notes=("walked uncompiled",)))
    assert "walked uncompiled" in noted.lines, "where no walk is shown, what has to be known of it still is"
    rounding = Finding(row, False, "all", (), 0.0, 0.0, ())
    guilty = replace(bisection, rows=(same, replace(changing, passed=False)))
    failing = replace(found, passed=False, finding=rounding)
    assert "FIRST DIVERGENCE" in explanation_document(replace(failing, bisection=guilty)).title
    assert explanation_document(replace(failing, bisection=None)).title.startswith("NOT FOUND")
    none = replace(found, bisection=replace(bisection, rows=(same,)))
    assert explanation_document(none).title.startswith("NOTHING FOUND")


def test_a_pass_that_is_wrong_is_named(pool: RankPool, runs: Runs) -> None:
    """Uncompiled, traced and with the passes before it all agrees; with the guilty pass it does not."""
    found = _explained(pool, runs, "eager", broken_pass.__name__)
    assert found.finding is None
    assert found.bisection is not None
    verdicts = {row.stage: row.passed for row in found.bisection.rows}
    guilty = PASSES.index(broken_pass.GUILTY)
    stages = (UNCOMPILED, TRACED, *PASSES)
    assert verdicts == {stage: i < 2 + guilty for i, stage in enumerate(stages)}
    assert found.bisection.guilty == broken_pass.GUILTY
    again = Explanation.from_dict(json.loads(json.dumps(json_ready(_as_dict(found)))))
    assert again == found


def test_every_stage_of_the_compiled_engine_is_bitwise(pool: RankPool, runs: Runs) -> None:
    """No stage changes a bit of eager's losses and gradients; the peak is counted for each."""
    job = replace(JOB, steps=1)
    known = {"eager": runs("eager", job), "float64": runs.referee(job)}
    found = bisect(pool, "compiled", "eager", job, bits=True, known=known, timeout_s=120)
    assert found is not None and found.guilty is None
    assert [row.reached for row in found.rows] == ["bitwise"] * 6
    assert all(row.peak_bytes for row in found.rows)


def test_stages_are_those_of_the_job() -> None:
    """A pass that the job leaves out is no stage, Inductor is one where it compiles, hooks have none."""
    job = replace(JOB, backend="inductor", disabled_passes=("bucket_gathers",))
    assert list(stage_jobs("compiled", job)) == [UNCOMPILED, TRACED, *PASSES[1:], INDUCTOR]
    assert stage_jobs("eager", job) == {} == stage_jobs("single", replace(job, block_backend="aot_eager"))
    assert list(stage_jobs("eager", replace(job, block_backend=INDUCTOR))) == [UNCOMPILED, "aot_eager", INDUCTOR]


# The command


def test_equal_bits_need_no_explanation(pool: RankPool, runs: Runs) -> None:
    """A pair without a divergence is not replayed."""
    found = _explained(pool, runs, "eager", "torch-fsdp2")
    assert (found.passed, found.rows, found.finding, found.bisection) == (True, (), None, None)


def test_explain_keeps_what_it_finds_with_the_run(tmp_path: Path) -> None:
    """`compare --explain` fails with the place; `explain` and `show` of the run print it again, with the same code."""
    words = ("--batch", "4", "--seq", "16", "--steps", "1", "--out", str(tmp_path))
    ran = call("compare", "--engines", "parity_tests.engines.summing", "--backend", "eager", "--explain", *words)
    assert ran.code == 1
    assert "FIRST DIVERGENCE: step 0, gradient: gradient of 'output.weight'" in ran.out
    shown = call("show", "latest", "--out", str(tmp_path), "--format", "json")
    assert shown.code == 1
    assert shown.json["explanation"]["finding"]["row"]["name"] == "output.weight"
    assert {row["phase"] for row in shown.json["tables"]["walk"]} == set(Phase)
    (report,) = tmp_path.glob("*/report.json")
    written_ns = report.stat().st_mtime_ns
    again = call("explain", "latest", "--out", str(tmp_path), "--format", "json")
    assert report.stat().st_mtime_ns == written_ns, "an old run that is explained is not the latest"
    assert again.code == 1
    assert again.json["explanation"]["finding"]["row"]["name"] == "output.weight"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "latest", "--pair", "single"), "pair: expected a reference and a candidate"),
        (("explain", "latest", "--pair", "eager,ddp"), "pair: expected one that was judged, found eager,ddp"),
        (("compare", "--engines", "eager", "--bisect-passes"), "bisect_passes: expected an engine that is compiled"),
    ],
)
def test_what_cannot_be_explained_is_refused(frozen_run: Path, words: tuple[str, ...], message: str) -> None:
    """One line, before a rank starts."""
    ran = call(*words, "--out", str(frozen_run.parent))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err and ran.err.count("\n") == 1


@pytest.fixture
def frozen_run(tmp_path: Path) -> Path:
    """A run on disk that no rank had to make."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in FROZEN.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _double(walk: Walk) -> Walk:
    return {place: tensor.double() for place, tensor in walk.items()}


def _as_dict(explanation: Explanation) -> dict[str, object]:
    return asdict(explanation)

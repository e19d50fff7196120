"""Cost curves: rounds of exactly the sizes asked for, figures that a cost model reads, and the command around them."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from exactness.toy_block import DrawnTableBlockDrafter

import treegraft
from treegraft.bench.costs import TARGET, Point, cost_table, measure, num_rounds, points
from treegraft.cli import main
from treegraft.errors import TreeGraftError
from treegraft.testing import MarkovTarget, TableDrafter, markov_table
from treegraft_plugins.costs import FileCosts, FixedCosts

ROWS, CONTEXTS = (1, 3, 16), (20, 64)


def load(pipeline="treegraft", drafter=None, max_length=None):
    table = markov_table(24, seed=1)
    target = MarkovTarget(table)
    target.max_length = max_length
    models = {"target": target, "middle": drafter or TableDrafter(table)}
    return treegraft.load(pipeline, "costs={use: fixed}", models=models)


@pytest.fixture(scope="module")
def measured():
    pipeline = load()
    ticks = []
    samples = measure(pipeline, ROWS, CONTEXTS, repeats=3, tick=lambda: ticks.append(1))
    return pipeline, samples, len(ticks)


def test_every_size_and_context_is_measured_as_often_as_asked(measured):
    pipeline, samples, num_ticks = measured
    num_sources = len(pipeline.sources)
    assert num_ticks == num_rounds(pipeline, ROWS, CONTEXTS, 3) == len(ROWS) * len(CONTEXTS) * 3 * num_sources
    target = {(point.rows, point.context): point.num_samples for point in points(samples) if point.name == TARGET}
    assert target == {(rows, context): 3 * num_sources for rows in ROWS for context in CONTEXTS}
    for source in ("small", "middle"):
        of_source = [sample for sample in samples if sample.name == source]
        assert len(of_source) == len(ROWS) * len(CONTEXTS) * 3
    assert all(sample.latency_ms > 0 for sample in samples)


def test_the_target_scores_the_rows_and_contexts_that_the_samples_say():
    pipeline = load()
    seen = []
    score, prefill = pipeline.target.score, pipeline.target.prefill

    def spy_score(trees):
        seen.append((len(trees[0]), None))
        return score(trees)

    def spy_prefill(prompts, wants):
        seen.append((None, len(prompts[0])))
        return prefill(prompts, wants)

    pipeline.target.score, pipeline.target.prefill = spy_score, spy_prefill
    samples = measure(pipeline, (1, 5), (30,), repeats=2)
    scored = [rows for rows, _ in seen if rows is not None]
    asked = [sample.rows for sample in samples if sample.name == TARGET]
    assert {length for _, length in seen if length is not None} == {31}  # 30 committed tokens and the root
    for rows in (1, 5):
        assert scored.count(rows) == asked.count(rows) > 0
    assert set(scored) == {1, 5, 2}  # 2: the first calls of a request, which are no measure


def test_a_pipeline_without_sources_has_a_target_curve_alone():
    samples = measure(load("plain"), (1, 4), (16,), repeats=2)
    assert {sample.name for sample in samples} == {TARGET}
    assert {sample.rows for sample in samples} == {1, 4}


def test_a_drafter_that_draws_is_measured_at_a_bare_root_and_the_target_at_every_size():
    target = MarkovTarget(markov_table(24, order=1, seed=1))
    drafter = DrawnTableBlockDrafter(target.table, num_places=2)
    pipeline = treegraft.load("dflash_sampled", "costs={use: fixed}", models={"target": target, "dflash": drafter})
    samples = measure(pipeline, (1, 5), (16,), repeats=2)
    assert sorted((sample.name, sample.rows) for sample in samples) == [
        *[("dflash", 3)] * 4, *[(TARGET, 1)] * 2, *[(TARGET, 5)] * 2
    ]  # fmt: skip
    assert pipeline.generate([1, 2, 3], 12, temperature=1.0).lossless


def test_the_pipeline_still_decodes_the_same_text_afterwards():
    pipeline = load()
    before = pipeline.generate([1, 2, 3], 12).token_ids
    measure(pipeline, (1, 4), (16,), repeats=1)
    assert pipeline.generate([1, 2, 3], 12).token_ids == before


def test_a_context_that_the_target_does_not_hold_is_refused():
    with pytest.raises(ValueError, match=r"The target's context holds 100"):
        measure(load(max_length=100), (1, 64), (64,), repeats=1)


def test_a_drafter_that_fails_ends_the_measurement():
    class Broken(TableDrafter):
        def draft(self, request):
            raise RuntimeError("out of order")

    with pytest.warns(treegraft.DrafterWarning), pytest.raises(TreeGraftError, match=r"sources\.middle"):
        measure(load("all_middle", Broken(markov_table(24, seed=1))), (1, 4), (16,), repeats=2)


# -- tables -----------------------------------------------------------------------------------------------------------


def point(name, rows, context, ms, num_samples=9):
    return Point(name, rows, context, num_samples, ms, ms, ms)


def test_what_context_costs_is_told_apart_from_what_rows_cost():
    """Latencies made by a known table come out as that table."""
    table = {"target": {1: 10.0, 8: 12.0, 64: 40.0}, "sources": {"small": 0.5, "middle": {1: 2.0, 8: 3.0}}}
    known = FixedCosts(**table, context_ms=4.0)
    measured = [point(TARGET, rows, context, float(known.target_ms(rows, context))) for rows in (1, 8, 64)
                for context in (128, 1024, 4096)]  # fmt: skip
    measured += [point("small", 0, 128, 0.5), point("middle", 1, 128, 2.0), point("middle", 8, 128, 3.0)]
    measured += [point("middle", 8, 4096, 9.0)]
    found = cost_table(measured)
    assert found["context_ms"] == pytest.approx(4.0)
    assert found["target"] == pytest.approx(table["target"])
    assert found["sources"] == {"small": {1: 0.5}, "middle": {1: 2.0, 8: 3.0}}


def test_with_one_context_the_figures_hold_there():
    found = cost_table([point(TARGET, 1, 128, 10.0), point(TARGET, 64, 128, 30.0)])
    assert (found["context_ms"], found["target"]) == (0.0, {1: 10.0, 64: 30.0})


def test_curves_never_fall():
    measured = [point(TARGET, rows, 128, ms) for rows, ms in ((1, 10.0), (2, 14.0), (4, 10.0), (8, 20.0))]
    assert cost_table(measured)["target"] == {1: 10.0, 2: 12.0, 4: 12.0, 8: 20.0}


def test_sizes_of_a_source_that_lie_close_are_one_knot():
    """Two knots beside each other would make a slope of noise, and the last one's goes on beyond."""
    measured = [point(TARGET, 1, 128, 9.0), point("middle", 32, 128, 5.0), point("middle", 33, 128, 9.0, 3)]
    assert cost_table(measured)["sources"]["middle"] == {32: 6.0}


def test_points_are_medians_and_quartiles(measured):
    _, samples, _ = measured
    for each in points(samples):
        own = [sample.latency_ms for sample in samples
               if (sample.name, sample.rows, sample.context) == (each.name, each.rows, each.context)]  # fmt: skip
        assert (each.low_ms, each.median_ms, each.high_ms) == pytest.approx(tuple(np.quantile(own, [0.25, 0.5, 0.75])))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("costs") / "here"
    words = ["bench", "costs", "all_small", "--rows", "1,4", "--repeats", "1", "--out", str(out), "--json"]
    return CliRunner().invoke(main, words, catch_exceptions=False), out


def test_the_command_writes_a_table_that_pipelines_read(written):
    result, out = written
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((out / "curves.json").read_text())
    assert (out / "costs.png").read_bytes().startswith(b"\x89PNG")
    table = FileCosts(str(out / "costs.json")).table()
    assert set(table["target"]) == {1, 4}
    assert set(table["sources"]) == {"small"}
    pipeline = treegraft.load("all_small", f"costs={{use: file, path: {out / 'costs.json'}}}")
    assert pipeline.costs.table()["target"] == table["target"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["all_small", "plain"], "one PIPELINE at most"),
        (["costs={use: measured}"], "costs are what is measured"),
        (["--rows", "0,1"], "a list of whole numbers from 1 on"),
        (["--contexts", "128,128"], "twice"),
        (["tregraft"], "Did you mean 'treegraft'?"),
    ],
)
def test_bad_use_is_refused_before_anything_is_loaded(monkeypatch, tmp_path, words, expected):
    monkeypatch.setattr("treegraft.cli.bench_costs.build", lambda *_: pytest.fail("models were loaded"))
    result = CliRunner().invoke(main, ["bench", "costs", *words, "--out", str(tmp_path / "new")])
    assert result.exit_code == 2
    assert expected in result.output
    assert not (tmp_path / "new").exists()


def test_without_the_extra_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr("treegraft.bench.records.find_spec", lambda name: None)
    monkeypatch.setattr("treegraft.cli.bench_costs.build", lambda *_: pytest.fail("models were loaded"))
    result = CliRunner().invoke(main, ["bench", "costs", "--out", str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "treegraft[bench]" in result.output


def test_a_folder_in_use_is_refused(written):
    _, out = written
    result = CliRunner().invoke(main, ["bench", "costs", "--out", str(out)])
    assert result.exit_code == 2
    assert "not empty" in result.output

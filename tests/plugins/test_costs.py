"""Cost models: a fixed table says what it was given, a file the same, a measured one what the clock said."""

import json
import os

import numpy as np
import pytest
from exactness.toy_block import DrawnTableBlockDrafter

import treegraft
from treegraft.testing import MarkovTarget, TableDrafter, markov_table
from treegraft_plugins import costs as costs_module
from treegraft_plugins.costs import FileCosts, FixedCosts, MeasuredCosts

TABLE = {"target": {"1": 10.0, "64": 40.0}, "sources": {"small": 0.5}, "context_ms": 2.0}


def test_fixed_without_a_table_takes_a_millisecond_at_any_size_and_nothing_for_sources():
    costs = FixedCosts()
    assert costs.target_ms([1, 64], 9000).tolist() == [1.0, 1.0]
    assert costs.source_ms("any", 10) == 0.0


def test_a_table_and_the_same_table_in_a_file_agree(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(TABLE))
    fixed, read = FixedCosts(**TABLE), FileCosts(str(path))
    assert fixed.table() == read.table()
    for costs in (fixed, read):
        assert costs.target_ms([1, 64], 2048).tolist() == [14.0, 44.0]
        assert costs.source_ms("small", 7) == 0.5


def test_a_table_survives_its_round_trip():
    assert FixedCosts(**FixedCosts(**TABLE).table()).table() == FixedCosts(**TABLE).table()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "3",
        '{"target": {"1": -3}}',
        '{"targets": 1}',
        '{"target": null}',
        '{"target": {"a": 1}}',
        '{"target": {}}',
        '{"target": {"0": 1}}',
        '{"target": {"-5": 1}}',
        '{"sources": [1]}',
        '{"context_ms": Infinity}',
        '{"context_ms": true}',
        '{"target": NaN}',
    ],
)
def test_a_file_that_holds_no_table_is_refused_by_name(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"costs\.json: no cost table"):
        FileCosts(str(path))


def load(*overrides):
    table = markov_table(8, seed=1)
    models = {"target": MarkovTarget(table), "middle": TableDrafter(table)}
    return treegraft.load("treegraft", *overrides, models=models)


def test_a_latency_says_what_it_may_be():
    for value in (None, {"a": 1}, {}, "fast"):
        with pytest.raises(ValueError, match=r"a latency \(ms\) or a mapping rows -> ms is needed"):
            FixedCosts(target=value)


def test_costs_for_a_source_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="lange"):
        load("costs={use: fixed, sources: {lange: 3.0}}")


def test_a_file_that_leaves_a_source_out_is_refused_and_may_hold_more(tmp_path):
    path = tmp_path / "costs.json"
    costs = f"costs={{use: file, path: {json.dumps(str(path))}}}"
    path.write_text(json.dumps({"target": 5.0, "sources": {"small": 0.5}}))
    with pytest.raises(treegraft.ComposeError, match=r"costs.json says nothing of middle\n.*small"):
        load(costs)
    path.write_text(json.dumps({"target": 5.0, "sources": {"small": 0.5, "middle": 0, "other": 1.0}}))
    assert set(load(costs).costs.table()["sources"]) == {"small", "middle"}


def test_measured_costs_are_positive_and_reported_with_the_generation():
    pipeline = load("costs={use: measured, cache: false}")
    costs = pipeline.generate([1, 2], 4).costs
    assert set(costs["sources"]) == {"small", "middle"}
    assert all(ms > 0 for ms in costs["target"].values())
    FixedCosts(**costs)  # so that the run can be repeated with it


def test_measurements_are_kept_on_disk_where_the_models_have_an_identity(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEGRAFT_CACHE", str(tmp_path))
    table = markov_table(8, seed=1)

    def bind(identity: str) -> MeasuredCosts:
        target = MarkovTarget(table)
        object.__setattr__(target, "identity", identity)
        measured = MeasuredCosts()
        measured.bind(target, [])
        return measured

    first = bind("toy on a desk")
    monkeypatch.setattr(costs_module, "_measure_target", lambda target: pytest.fail("measured again"))
    assert bind("toy on a desk").table() == first.table()
    assert len(list(tmp_path.rglob("*.json"))) == 1
    with pytest.raises(pytest.fail.Exception):
        bind("toy on another desk")
    with pytest.raises(pytest.fail.Exception):
        bind("")


@pytest.mark.parametrize("content", ["{}", '{"target": 1.0}', "[]", ""])
def test_a_damaged_cache_costs_nothing_but_the_measurement(content, tmp_path, monkeypatch):
    monkeypatch.setenv("TREEGRAFT_CACHE", os.fspath(tmp_path))
    monkeypatch.setattr(MarkovTarget, "identity", "toy", raising=False)
    monkeypatch.setattr(TableDrafter, "identity", "table", raising=False)
    load("costs={use: measured}")
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content)
    assert set(load("costs={use: measured}").costs.table()["sources"]) == {"small", "middle"}


def test_an_unwritable_cache_costs_nothing_but_the_measurement(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEGRAFT_CACHE", os.fspath(tmp_path / "file"))
    target = MarkovTarget(markov_table(8, seed=1))
    object.__setattr__(target, "identity", "toy")
    costs = MeasuredCosts()
    costs.bind(target, [])
    costs.save()
    assert np.isfinite(costs.target_ms([1, 64], 0)).all()


def test_a_size_that_there_was_no_time_to_measure_is_learnt_from_rounds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("treegraft_plugins.costs.time.perf_counter", lambda: clock[0])
    latency = {1: 1.0, 2: 2.0, 4: 4.0, 8: 5.0}  # s: after the largest, 2 and 8 there is no time for 4

    class SlowTarget(MarkovTarget):
        def score(self, trees):
            clock[0] += latency.get(len(trees[0]), 9.0)
            return super().score(trees)

    costs = MeasuredCosts(cache=False)
    costs.bind(SlowTarget(markov_table(512, seed=1)), [])
    assert costs.target_ms([1, 2, 8, 64], 0) == pytest.approx([1000.0, 2000.0, 5000.0, 9000.0])
    assert costs.target_ms(4, 0) == pytest.approx(3000.0), "in between"
    for _ in range(200):
        for rows in (1, 2, 4):
            costs.record_target(rows, 0, latency[rows] * 1e3)
    assert costs.target_ms([1, 2, 4], 0) == pytest.approx([1000.0, 2000.0, 4000.0], rel=0.02)


def test_a_drafter_that_draws_is_measured_like_others(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("treegraft_plugins.costs.time.perf_counter", lambda: clock[0])

    class SlowTarget(MarkovTarget):
        def score(self, trees):
            clock[0] += 1.0
            return super().score(trees)

    class TimedDrafter(DrawnTableBlockDrafter):
        def draft(self, request):
            clock[0] += 0.005
            return super().draft(request)

    target = SlowTarget(markov_table(8, order=1, seed=1))
    drafter = TimedDrafter(target.table, num_places=2)
    pipeline = treegraft.load(
        "dflash_sampled", "costs={use: measured, cache: false}", models={"target": target, "dflash": drafter}
    )
    assert pipeline.costs.source_ms("dflash", 3) == pytest.approx(5.0)


@pytest.mark.parametrize("stalled", [1, 4, 16])
def test_a_size_during_which_the_machine_stalled_says_nothing_of_larger_ones(monkeypatch, stalled):
    """A stall only ever adds: what a larger size took is a bound on a smaller one, and never the other way round."""
    clock = [0.0]
    monkeypatch.setattr("treegraft_plugins.costs.time.perf_counter", lambda: clock[0])

    class StallingTarget(MarkovTarget):
        def score(self, trees):
            rows = len(trees[0])
            clock[0] += 1.0 + rows / 64 + (30.0 if rows == stalled else 0.0)  # so slow that each size has one chance
            return super().score(trees)

    costs = MeasuredCosts(cache=False)
    costs.bind(StallingTarget(markov_table(8, seed=1)), [])
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert costs.target_ms(64, 0) == pytest.approx(2000.0)
    assert all(costs.target_ms(size, 0) <= 2000.0 for size in sizes)

"""The offline path of the distilled scheduler: labels, folds, the search over suffixes, worlds with known answers."""

import itertools
from pathlib import Path

import attrs
import numpy as np
import pytest
from distilled_world import SETUP, SPEAKS, rounds
from hypothesis import given
from hypothesis import strategies as st

from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.distilled import fit, report, trajectories
from treegraft_plugins.schedulers.distilled.collect import read_rounds, write_rounds
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES
from treegraft_plugins.schedulers.distilled.weights import Header, Weights, read_header, read_weights

SPEAKING = list(CANDIDATES)[SPEAKS]


# -- schedules and states ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_schedule_passes_the_states_of_its_own_history(steps):
    histories = trajectories.histories(steps)
    assert len(histories) == trajectories.num_states(steps) == len(set(histories))
    everything = trajectories.schedules(steps)
    assert {tuple(row) for row in everything.tolist()} == set(itertools.product((False, True), repeat=steps))
    for schedule, states in zip(everything.tolist(), trajectories.states_of(steps), strict=True):
        assert [histories[state] for state in states] == [tuple(schedule[:step]) for step in range(steps)]


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_skip_and_call_rows_split_evenly_and_name_the_schedule_they_make(steps):
    rows = list(trajectories.decisions(steps))
    assert len(rows) == steps * 2**steps
    assert sum(called for _, called, _, _ in rows) * 2 == len(rows)
    histories, everything = trajectories.histories(steps), trajectories.schedules(steps)
    for state, called, suffix, schedule in rows:
        assert (*histories[state], called, *suffix) == tuple(everything[schedule].tolist())


# -- folds ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdefgh"), min_size=5, max_size=60).filter(lambda names: len(set(names)) >= 3))
def test_folds_never_split_a_report_and_leave_none_empty(names):
    fold = trajectories.folds(names, 3)
    assert set(fold.tolist()) == {0, 1, 2}
    for name in set(names):
        assert len({int(k) for k, other in zip(fold, names, strict=True) if other == name}) == 1


def test_too_few_reports_are_refused():
    with pytest.raises(ValueError, match=r"2 reports \(a, b\) cannot fill 3 folds"):
        trajectories.folds(["a", "b", "a"], 3)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_accepted_counts_the_nodes_of_the_reference_within_the_budget():
    some = rounds(4)
    ranks = np.zeros_like(some.ranks)
    ranks[..., :3] = [2, 7, 40]
    some = attrs.evolve(some, ranks=ranks)
    for budget, accepted in ((0, 0), (1, 0), (2, 1), (7, 2), (39, 2), (63, 3)):
        assert (some.accepted(np.full(some.num_nodes.shape, budget)) == accepted).all()


def test_a_label_is_the_bonus_too_and_the_time_of_every_step():
    some = rounds(6)
    costs = FixedCosts(target={1: 10.0, 64: 73.0}, sources={"small": 0.5, "middle": {1: 1.0, 10: 4.0}})
    place = fit.world(some, SETUP, costs, adaptive=False)
    calls = trajectories.schedules(some.steps).sum(1)
    assert np.allclose(place.result.ms, 73.0 + 4.0 * calls + 0.5 * (some.steps - calls))
    assert (place.result.emitted == some.accepted(np.full(some.num_nodes.shape, 63)) + 1).all()


def test_an_adaptive_budget_is_the_best_one_at_the_better_endpoint_s_rate():
    some = rounds(50)
    costs = FixedCosts(target={1: 10.0, 2: 20.0, 64: 700.0}, sources={"small": 0.1, "middle": 1.0})
    full, adaptive = (fit.world(some, SETUP, costs, adaptive=each) for each in (False, True))
    assert adaptive.result.ms.mean() < full.result.ms.mean() / 5
    assert adaptive.result.fixed_rates().max() > full.result.fixed_rates().max()


def test_the_oracle_is_the_best_of_all_choices_by_brute_force():
    some = rounds(5, steps=2)
    result = fit.world(some, SETUP, fit.flat_costs(SETUP, 3.0), adaptive=False).result
    best = max(
        result.emitted[range(5), choice].sum() / result.ms[range(5), choice].sum()
        for choice in itertools.product(range(4), repeat=5)
    )
    assert result.rate(result.oracle()) == pytest.approx(best)


# -- the value system -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    """Worlds under several tables, and a value system fitted to them."""
    some = rounds(300)
    fold = trajectories.folds(some.report, 5)
    worlds = [fit.world(some, SETUP, costs, adapt) for costs, adapt in fit.sampled_costs(None, SETUP, 4)]
    return some, fold, worlds, fit.fit_value_system(worlds, [SPEAKING], fold, num_steps=400)


def test_the_search_over_suffixes_equals_brute_force(world):
    some, fold, worlds, system = world
    state = fit.state_inputs(worlds[0], system.names)
    found = system.quality(state, fold)
    for row, (number, history) in itertools.product((0, 17), enumerate(trajectories.histories(some.steps))):
        for action in (0, 1):
            rest = some.steps - len(history) - 1
            rates = []
            for suffix in itertools.product((0.0, 1.0), repeat=rest):
                flags = [*[0.0] * (len(history) + 1), *suffix, sum(suffix) / some.steps]
                x = system.normaliser(np.concatenate([state[row, number], flags]))[None]
                accepted, log_ms = (system.call if action else system.skip).predict(x).reshape(2, -1)[:, fold[row]]
                scale = system.scale
                rates.append(
                    np.log1p(max(accepted * scale[0, 1] + scale[0, 0], 0.0)) - (log_ms * scale[1, 1] + scale[1, 0])
                )
            assert found[row, number, action] == pytest.approx(max(rates), abs=1e-4)


def test_searched_online_it_gives_the_folds_average(world):
    some, _, worlds, system = world
    state = fit.state_inputs(worlds[0], system.names)
    quality = system.quality(state)
    for number, history in enumerate(trajectories.histories(some.steps)):
        margin = system.margin(state[3, number], history)
        assert margin == pytest.approx(quality[3, number, 1] - quality[3, number, 0], abs=1e-4)


def test_a_network_never_sees_its_own_fold():
    """What was planted into one fold alone must not be known to the networks that judge it."""
    some = rounds(200, gain=0)
    fold = trajectories.folds(some.report, 5)
    ranks = some.ranks.copy()
    ranks[fold == 2] = np.arange(1, ranks.shape[-1] + 1)  # there everything is accepted
    worlds = [fit.world(attrs.evolve(some, ranks=ranks), SETUP, fit.flat_costs(SETUP, 4.0), False)]
    system = fit.fit_value_system(worlds, [SPEAKING], fold, num_steps=400)
    state = fit.state_inputs(worlds[0], system.names)
    rate = np.exp(system.quality(state, fold))[..., 0].mean(1)
    assert rate[fold == 2].mean() == pytest.approx(rate[fold != 2].mean(), rel=2.0)
    assert rate[fold == 2].mean() < 0.5 * np.exp(system.quality(state, np.full(len(some), 0)))[fold == 2, :, 0].mean()


# -- known answers ----------------------------------------------------------------------------------------------------


def test_the_known_best_policy_is_recovered_from_the_one_signal_that_speaks(world):
    some, fold, worlds, system = world
    margins = fit.margins(system, worlds, fold)
    predictors = fit.fit_predictors(worlds, [SPEAKING], margins, fold, num_steps=400)
    place = fit.world(some, SETUP, fit.flat_costs(SETUP, 3.0), adaptive=False)
    taken = fit.follow(place, fit.out_of_fold(predictors, place, fold))
    helps = some.signals[:, 0, SPEAKS] > 0
    right = (taken >= 2 ** (some.steps - 1)) == helps  # the first decision is to call
    assert right.mean() > 0.9
    assert place.result.rate(taken) > 1.05 * place.result.fixed_rates().max()


def test_selection_finds_the_one_signal_that_speaks():
    some = rounds(200)
    fold = trajectories.folds(some.report, 2)
    worlds = [fit.world(some, SETUP, fit.flat_costs(SETUP, 4.0), False)]
    curve = fit.select_signals(worlds, fold, most=1, num_steps=150)
    assert [name for name, _ in curve] == ["", SPEAKING]
    assert curve[1][1] < curve[0][1]


def test_emitted_with_the_bonus_is_what_is_maximised():
    """Skipping brings 0.3 tokens in 20 ms and calling 1.0 in 45 ms: without the bonus, calling would look faster."""
    some = rounds(100, steps=1)
    ranks = np.zeros_like(some.ranks)
    ranks[:30, 0, 0] = ranks[:, 1, 0] = 1
    some = attrs.evolve(some, ranks=ranks)
    costs = FixedCosts(target=20.0, sources={"small": 0.0, "middle": 25.0})
    result = fit.world(some, SETUP, costs, adaptive=False).result
    accepted = (result.emitted - 1).sum(0) / result.ms.sum(0)
    assert accepted.argmax() == 1
    assert result.best_fixed() == 0
    assert result.rate(result.oracle()) >= result.fixed_rates()[0]


@pytest.mark.parametrize(("gain", "ratio", "learned"), [(0, 4.0, "never"), (12, 1000.0, "always")])
def test_a_scheduler_that_only_learned_always_or_never_is_recognised(gain, ratio, learned):
    some = rounds(60)
    follow = {"never": 0, "always": 2**some.steps - 1}[learned]
    tables = [("flat", fit.flat_costs(SETUP, ratio), False)]
    (line,) = (
        line
        for line in report.lines(some, SETUP, tables, lambda place: np.full(len(place.rounds), follow))
        if line.report == "all"
    )
    assert line.learned == learned
    assert gain >= 0


# -- on disk ----------------------------------------------------------------------------------------------------------


def test_rounds_round_trip(tmp_path):
    some = rounds(7)
    write_rounds(tmp_path / "part.parquet", some)
    again = read_rounds(tmp_path / "part.parquet")
    for name in trajectories.COLUMNS:
        assert np.array_equal(getattr(again, name), getattr(some, name)), name
    assert again.steps == some.steps
    assert [path.name for path in tmp_path.iterdir()] == ["part.parquet"]


def header(**changes) -> Header:
    return attrs.evolve(
        Header(
            signals=(SPEAKING,), steps=3, pairs=(("target", "middle"),), vocab_sizes=(7,), ratios=(1.0, 40.0), width=10,
            max_nodes=63, ablation=None, versions={"treegraft": "0"},
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("keep_value", [False, True])
def test_weights_round_trip(world, tmp_path, keep_value):
    _, fold, worlds, system = world
    predictor = fit.fit_predictors(worlds, [SPEAKING], fit.margins(system, worlds, fold), fold, num_steps=5)[-1]
    path = tmp_path / "some.safetensors"
    Weights(header(), predictor, system if keep_value else None).save(path)
    again = read_weights(path)
    state = fit.state_inputs(worlds[0], [SPEAKING])
    assert again.header == read_header(path) == header()
    assert np.array_equal(again.predictor(state), predictor(state))
    assert (again.value is not None) == keep_value
    if again.value is not None:
        assert np.allclose(again.value.quality(state), system.quality(state))


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path):
    (tmp_path / "text.safetensors").write_text("not weights")
    for name in ("text.safetensors", "missing.safetensors"):
        with pytest.raises(ValueError, match="no fitted weights"):
            read_header(tmp_path / name)


@pytest.mark.parametrize("changes", [{"format": 99}, {"signals": ("unheard_of",)}])
def test_weights_of_another_format_or_with_unknown_signals_are_refused(world, tmp_path, changes):
    _, fold, worlds, system = world
    predictor = fit.fit_predictors(worlds, [SPEAKING], fit.margins(system, worlds, fold), fold, num_steps=5)[-1]
    Weights(header(**changes), predictor).save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"format 99|unheard_of"):
        read_header(tmp_path / "other.safetensors")

"""The offline path of the distilled scheduler: labels, folds, the search over suffixes, worlds with known answers."""

import itertools
from pathlib import Path

import attrs
import numpy as np
import pytest
from collecting_toy import manifest
from distilled_world import SETUP, SPEAKS, rounds
from hypothesis import given
from hypothesis import strategies as st

from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.schedulers.distilled import fit, report, trajectories
from treegraft_plugins.schedulers.distilled.collect import read_rounds, write_rounds
from treegraft_plugins.schedulers.distilled.offline import Fitted, Material
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES
from treegraft_plugins.schedulers.distilled.weights import Header, Weights, read_header, read_weights

SPEAKING = list(CANDIDATES)[SPEAKS]
NUM_STEPS = 150  # of training


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


def test_what_the_middle_missed_is_paid_for_unless_it_is_never_called():
    some = attrs.evolve(rounds(6), missed=np.full((6, 4), 3))
    costs = FixedCosts(target=70.0, sources={"small": 0.5, "middle": {1: 1.0, 10: 4.0, 13: 7.0}})
    result = fit.world(some, SETUP, costs, adaptive=False).result
    never, mixed = np.zeros(6, np.int64), np.array([0, 0, 0, 0, 0, 3])
    assert result.along(never)[1].tolist() == [71.0] * 6
    assert result.along(mixed)[1].tolist() == [74.0] * 5 + [70.0 + 8.0 + 3.0]
    assert result.fixed_rates()[[0, 3]].tolist() == pytest.approx(
        [result.emitted[:, number].sum() / ms / 6 for number, ms in ((0, 71.0), (3, 81.0))]
    )
    assert result.rate(result.oracle()) >= result.fixed_rates().max()


@attrs.frozen
class Qualities:
    """A value system that says the same of every round."""

    steps: int
    names: tuple[str, ...]
    said: np.ndarray  # [2^D - 1, 2]

    def quality(self, state, fold):
        return np.broadcast_to(self.said, (len(state), *self.said.shape))


def test_where_never_calling_is_best_a_first_call_must_also_bring_what_the_middle_has_to_catch_up_with():
    """It takes in the tokens of all the rounds before it; a text that calls anyway pays for them once."""
    missed = np.tile([1, 1, 1, 1], (6, 1))
    costs = FixedCosts(target=70.0, sources={"small": 0.5, "middle": {10: 4.0, 110: 4.07}})
    system = Qualities(2, (), np.array([[0.3, 0.9], [0.0, 0.6], [0.1, 0.5]]))  # states: first; skipped; called
    for gain, is_idle in ((0, True), (20, False)):
        some = rounds(6)
        ranks = np.zeros_like(some.ranks)
        ranks[:, 2:, :gain] = np.arange(gain) + 1
        place = fit.world(attrs.evolve(some, missed=missed, ranks=ranks), SETUP, costs, adaptive=False)
        assert place.idle.tolist() == [is_idle] * 6
        owed = np.where(place.idle, place.rate * 0.07, 0.0)[:, None]
        wanted = [0.9 - owed - np.maximum(0.3 - owed, 0.0), 0.6 - owed, np.full((6, 1), 0.4)]
        assert np.allclose(fit.margins(system, [place], np.zeros(6, np.int64))[0], np.hstack(wanted))


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
    some = rounds()
    fold = trajectories.folds(some.report, 3)
    worlds = [fit.world(some, SETUP, costs, adapt) for costs, adapt in fit.sampled_costs(None, SETUP, 3)]
    return some, fold, worlds, fit.fit_value_system(worlds, [SPEAKING], fold, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def predictors(world):
    """Predictors of its margins."""
    _, fold, worlds, system = world
    return fit.fit_predictors(worlds, [SPEAKING], fit.margins(system, worlds, fold), fold, num_steps=NUM_STEPS)


def test_the_search_over_suffixes_equals_brute_force(world):
    some, fold, worlds, system = world
    state = fit.state_inputs(worlds[0], system.names)
    found = system.quality(state, fold)
    result, rate = worlds[0].result, worlds[0].rate
    for row, (number, history) in itertools.product((0, 17), enumerate(trajectories.histories(some.steps))):
        for action in (0, 1):
            rest = some.steps - len(history) - 1
            surpluses = []
            for suffix in itertools.product((0.0, 1.0), repeat=rest):
                num_calls = action + sum(suffix)
                calls_take = num_calls * result.middle_ms[row] / result.target_ms[row]
                flags = [*[0.0] * (len(history) + 1), *suffix, sum(suffix) / some.steps, num_calls, calls_take]
                x = system.normaliser(np.concatenate([state[row, number], flags]))[None]
                heads = system.call if action else system.skip
                accepted, latency = heads.predict(x).reshape(2, -1)[:, fold[row]] * system.scale
                ms = (calls_take + latency) * result.target_ms[row]
                surpluses.append(accepted - rate[row] * ms if num_calls else 0.0)
            assert found[row, number, action] == pytest.approx(max(surpluses), abs=1e-3)


def test_searched_online_it_gives_the_folds_average(world):
    some, _, worlds, system = world
    state = fit.state_inputs(worlds[0], system.names)
    quality = system.quality(state)
    for number, history in enumerate(trajectories.histories(some.steps)):
        margin = system.margin(state[3, number], history)
        assert margin == pytest.approx(quality[3, number, 1] - quality[3, number, 0], abs=1e-3)


def test_a_network_never_sees_its_own_fold():
    """What was planted into one fold alone must not be known to the networks that judge it."""
    some = rounds(60, steps=1, gain=0)
    fold = trajectories.folds(some.report, 3)
    ranks = some.ranks.copy()
    ranks[fold == 2, 1] = np.arange(1, ranks.shape[-1] + 1)  # there everything is accepted if the middle is called
    place = fit.world(attrs.evolve(some, ranks=ranks), SETUP, fit.flat_costs(SETUP, 4.0), False)
    worlds = [attrs.evolve(place, rate=np.full(len(some), 0.02))]  # what time is worth would tell
    system = fit.fit_value_system(worlds, [SPEAKING], fold, num_steps=NUM_STEPS)
    state, others = fit.state_inputs(worlds[0], system.names), np.zeros(len(some), np.int64)
    unknown, known = (system.quality(state, each)[fold == 2, :, 1].mean() for each in (fold, others))
    assert unknown < 4.0 and known > 6.0


# -- known answers ----------------------------------------------------------------------------------------------------


def test_the_known_best_policy_is_recovered_from_the_one_signal_that_speaks(world, predictors):
    some, fold, _, _ = world
    place = fit.world(some, SETUP, fit.flat_costs(SETUP, 3.0), adaptive=False)
    taken = fit.follow(place, lambda place: fit.out_of_fold(predictors, place, fold))
    helps = some.signals[:, 0, SPEAKS] > 0
    right = (taken >= 2 ** (some.steps - 1)) == helps  # the first decision is to call
    assert right.mean() > 0.9
    assert place.result.rate(taken) > 1.05 * place.result.fixed_rates().max()


def test_time_earns_what_the_schedules_taken_earn_and_no_less_than_plain_decoding():
    some = rounds(60)
    place = fit.world(some, SETUP, FixedCosts(target={1: 1.0, 64: 60.0}, sources={"middle": 20.0}), adaptive=False)
    assert (place.rate == 1.0).all()  # a token a ms
    place = fit.world(some, SETUP, fit.flat_costs(SETUP, 3.0), adaptive=False)
    best = {
        report: place.result.take(some.report == report).fixed_rates().max() for report in set(some.report.tolist())
    }
    assert place.rate.tolist() == pytest.approx([best[name] for name in some.report.tolist()])
    seen = []

    def margins(place):
        seen.append(place.rate)
        return np.ones((len(some), 3))

    taken = fit.follow(place, margins)
    assert (taken == 3).all() and len(seen) > 1
    for name in best:
        own = some.report == name
        assert seen[-1][own] == pytest.approx(max(0.01, place.result.take(own).rate(taken[own])))


def test_every_report_weighs_alike_in_a_fit():
    some = rounds(60).take(np.array([*range(0, 60, 3), 1, 4, 2]))  # 20, 2 and 1 rounds of three reports
    shares = fit._shares(some)
    totals = [shares[some.report == name].sum() for name in np.unique(some.report)]
    assert totals == pytest.approx([len(some) / 3] * 3)


def test_selection_finds_the_one_signal_that_speaks():
    some = rounds(80, steps=1, num_reports=2)
    fold = trajectories.folds(some.report, 2)
    worlds = [fit.world(some, SETUP, fit.flat_costs(SETUP, 4.0), False)]
    curve = fit.select_signals(worlds, fold, most=1, num_steps=100)
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


@pytest.mark.parametrize(("reports", "gain"), [(("mixed", "mixed"), -1.25), (("poor", "rich"), 1 / 3)])
def test_a_round_is_worth_the_time_that_its_text_would_not_use_better(reports, gain):
    """A call turns 1 token in 100 ms into 2 in 150 ms: right in text that has no more, wrong where others make 8."""
    some, is_poor = rounds(40, steps=1), np.arange(40) < 20
    ranks = np.zeros_like(some.ranks)
    ranks[is_poor, 1, 0] = 1
    ranks[~is_poor, :, :7] = np.arange(1, 8)
    some = attrs.evolve(some, ranks=ranks, report=np.where(is_poor, *reports))
    costs = FixedCosts(target=100.0, sources={"small": 0.0, "middle": 50.0})
    place = fit.world(some, SETUP, costs, adaptive=False)
    assert report.hindsight(place)[is_poor, 0] == pytest.approx(gain)
    assert (report.hindsight(place)[~is_poor, 0] < 0).all()


@pytest.mark.parametrize("learned", ["never", "always", "01", ""])
def test_a_line_says_where_a_scheduler_only_learned_always_or_never(learned):
    some = rounds(60)
    taken = {"never": 0, "always": 3, "01": 1, "": some.num_prompt_tokens % 4}[learned] + np.zeros(len(some), np.int64)
    found = report.lines(some, SETUP, [("flat", fit.flat_costs(SETUP, 4.0), False)], lambda place: taken)
    assert [line.report for line in found] == ["pair x 0", "pair x 1", "pair x 2", "all"]
    assert {line.learned for line in found} == {learned}


@pytest.mark.parametrize("learned", ["never", "always", ""])
def test_the_report_says_so_at_its_beginning(world, predictors, tmp_path, learned):
    some, fold, worlds, system = world
    if learned:
        nothing = {name: np.zeros_like(layer) for name, layer in predictors[0].weights.items()}
        margin = {"b3": np.float32([{"never": -1.0, "always": 1.0}[learned]])}
        predictors = [attrs.evolve(each, weights=nothing | margin) for each in predictors]
    material = Material((manifest(setup=SETUP, target="t", middle="m"),), (some,), fold, tuple(worlds))
    fitted = Fitted(material, [], {"error": 0.5}, system, predictors, Weights(header(), predictors[-1]))
    text = report.write_report(fitted, tmp_path).read_text()
    assert ("It has learned nothing but" in text) == bool(learned)
    assert text.startswith(f"# A fitted scheduler\n\n**It has learned nothing but {learned}**: ") == bool(learned)
    assert (
        "| t + m, temperature 0 | flat, ratio 2 | 60 |" in text
        and "| pair x 2, temperature 0 | as measured | 20 |" in text
    )


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
            signals=(SPEAKING,), steps=2, pairs=(("target", "middle"),), small="", vocab_sizes=(7,),
            ratios=(1.0, 40.0), width=10, max_nodes=63, ablation=None, versions={"treegraft": "0"},
        ),
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("keep_value", [False, True])
def test_weights_round_trip(world, predictors, tmp_path, keep_value):
    (_, _, worlds, system), predictor = world, predictors[-1]
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
def test_weights_of_another_format_or_with_unknown_signals_are_refused(predictors, tmp_path, changes):
    Weights(header(**changes), predictors[-1]).save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"format 99|unheard_of"):
        read_header(tmp_path / "other.safetensors")

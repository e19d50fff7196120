"""Statistics: curves interpolate and learn, calibration recovers a known distortion, the best budget is the best."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegraft.statistics import AcceptanceStats, Calibration, LatencyCurve, best_budget, logit


def test_a_curve_interpolates_between_knots_and_goes_on_with_the_last_slope():
    curve = LatencyCurve.of({1: 10.0, 11: 20.0, 21: 40.0})
    assert curve([1, 6, 11, 16, 21, 31]).tolist() == [10.0, 15.0, 20.0, 30.0, 40.0, 60.0]


def test_a_number_is_the_same_at_any_size():
    assert LatencyCurve.of(3).table() == {1: 3.0}
    assert LatencyCurve.of(3)([1, 500]).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("table", [{1: -1.0}, {1: float("nan")}, {}])
def test_a_curve_refuses_what_is_no_latency(table):
    with pytest.raises(ValueError, match="latenc"):
        LatencyCurve.of(table)


def test_a_curve_follows_a_slower_machine_at_every_knot():
    curve = LatencyCurve.of({1: 10.0, 8: 12.0, 64: 30.0})
    for _ in range(200):
        for rows in (1, 8, 64):
            curve.learn(rows, 2.0 * {1: 10.0, 8: 12.0, 64: 30.0}[rows])
    assert curve.ms == pytest.approx([20.0, 24.0, 60.0], rel=0.02)


def test_one_hiccup_cannot_turn_a_curve():
    curve = LatencyCurve.of({1: 10.0, 8: 12.0})
    curve.learn(1, 10_000.0)
    assert curve(1) <= 12.0


@given(st.lists(st.floats(-8, 0), min_size=0, max_size=12), st.floats(0, 1), st.integers(0, 12), st.floats(0.1, 5))
def test_the_best_budget_beats_every_other(edges, rate, limit, slope):
    scores = np.array([0.0, *edges])
    target_ms = 1.0 + slope * np.arange(limit + 1)
    chosen, worth = best_budget(scores, rate, target_ms)
    ranked = np.sort(scores[1:])[::-1]
    worths = [np.exp(ranked[:n]).sum() - rate * target_ms[n] for n in range(min(limit, len(ranked)) + 1)]
    assert worth == pytest.approx(max(worths))
    assert worths[chosen] == pytest.approx(max(worths))


def test_calibration_begins_as_the_identity_within_the_clip():
    log_prob = np.log([0.001, 0.2, 0.9, 0.99])
    assert Calibration().edge(log_prob, np.array([1, 2, 5, 30])) == pytest.approx(log_prob)


@given(
    st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=30),
    st.lists(st.floats(-30, 0), min_size=1, max_size=20),
    st.integers(1, 40),
)
def test_calibrated_edges_are_finite_never_positive_and_keep_the_order(labels, log_probs, depth):
    calibration = Calibration()
    logits, depths, accepted = map(np.array, zip(*labels, strict=True))
    for _ in range(5):
        calibration.learn(logits, depths, accepted)
    ordered = np.sort(log_probs)
    edges = calibration.edge(ordered, np.full(len(ordered), depth))
    assert np.isfinite(edges).all()
    assert (edges <= 0).all()
    assert (np.diff(edges) >= 0).all()


def fitted(claimed_logit, depth, truth, rng):
    """A calibration after labels drawn with probability `truth`."""
    calibration = Calibration(window=4000, prior=1.0)
    for start in range(0, len(truth), 50):
        part = slice(start, start + 50)
        calibration.learn(claimed_logit[part], depth[part], rng.random(50) < truth[part])
    return calibration


def test_calibration_recovers_a_known_distortion():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.02, 0.98, 6000)
    claimed = np.clip((logit(np.log(truth)) + 2.0) / 0.5, -9, 9)  # far too sure of itself
    depth = np.ones(6000, np.int64)
    calibration = fitted(claimed, depth, truth, rng)
    for probability in (0.1, 0.3, 0.5):
        log_prob = -np.logaddexp(0.0, -(logit(np.log([probability])) + 2.0) / 0.5)
        assert np.exp(calibration.edge(log_prob, np.ones(1, np.int64))) == pytest.approx(probability, abs=0.03)


def test_calibration_learns_that_deep_nodes_are_likelier():
    rng = np.random.default_rng(0)
    depth = rng.choice([1, 8], 6000)
    claimed = rng.uniform(-1, 1, 6000)
    truth = 1.0 / (1.0 + np.exp(-(claimed + np.where(depth == 8, 2.0, -1.0))))
    calibration = fitted(claimed, depth, truth, rng)
    edges = calibration.edge(np.log([0.5, 0.5]), np.array([1, 8]))
    assert np.exp(edges) == pytest.approx([1 / (1 + np.e), 1 / (1 + np.exp(-2))], abs=0.04)


@given(st.integers(1, 60))
def test_the_raw_logit_is_recovered_from_a_calibrated_edge(depth):
    calibration = Calibration()
    calibration.learn(np.array([2.0, -1.0, 3.0, 0.5]), np.array([1, 2, 4, 9]), [False, True, True, False])
    raw = np.array([-4.0, -0.3, 0.0, 2.5])
    depths = np.full(4, depth)
    edge = calibration.edge(-np.logaddexp(0.0, -raw), depths)
    assert calibration.raw_logit(edge, depths) == pytest.approx(raw)


def test_acceptance_without_calibration_leaves_scores_as_drafted():
    acceptance = AcceptanceStats(1, calibrate=False)
    log_prob = np.log([1e-9, 0.5, 1.0])
    acceptance.learn_edges(0, log_prob, np.array([1, 1, 1]), [True, False, True])
    assert acceptance.calibrated(0, log_prob, np.array([1, 1, 1])) is log_prob


def test_rates_are_moving_averages_of_what_was_recorded():
    acceptance = AcceptanceStats(1)
    assert acceptance.emitted_per_ms == acceptance.round_ms == 0.0
    for _ in range(30):
        acceptance.learn_round(num_emitted=3, num_accepted=2, num_verified=5, modelled_ms=12.0)
    assert acceptance.emitted_per_ms == pytest.approx(0.25)
    assert acceptance.round_ms == pytest.approx(12.0)
    for _ in range(200):
        acceptance.learn_round(num_emitted=1, num_accepted=0, num_verified=0, modelled_ms=10.0)
    assert acceptance.emitted_per_ms == pytest.approx(0.1, rel=0.01)
    assert acceptance.last_verified_round == 29


def test_options_are_learnt_in_the_rounds_in_which_they_are_read():
    acceptance = AcceptanceStats(1)
    assert not acceptance.are_options_read
    assert acceptance.options == {} and acceptance.are_options_read
    acceptance.learn_round(num_emitted=1, num_accepted=0, num_verified=0, modelled_ms=1.0)
    assert not acceptance.are_options_read, "a new round"


def test_an_option_is_hopeful_until_tried_and_counts_hot_rounds_apart():
    acceptance = AcceptanceStats(1)
    assert acceptance.options == {}
    acceptance.learn_step("small", 0, gain=0.0, num_rows=4)
    acceptance.learn_round(num_emitted=3, num_accepted=2, num_verified=5, modelled_ms=1.0)
    acceptance.learn_step("small", 0, gain=2.0, num_rows=8)
    cold, hot = acceptance.options["small", 0, False], acceptance.options["small", 0, True]
    assert (cold.gain, cold.num_rows, cold.last_round) == (0.0, 4.0, 0)
    assert (hot.gain, hot.num_rows, hot.last_round) == (2.0, 8.0, 1)

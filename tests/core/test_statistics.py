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


@given(
    st.lists(st.floats(-8, 0), min_size=0, max_size=12), st.floats(0, 1), st.integers(0, 12), st.floats(0.1, 5)
)
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
    assert Calibration().edge(log_prob) == pytest.approx(log_prob)


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=20))
def test_calibrated_edges_are_finite_and_never_positive(log_probs):
    calibration = Calibration()
    calibration.learn(np.array([2.0, -1.0, 3.0]), [False, True, False])
    edges = calibration.edge(np.array(log_probs))
    assert np.isfinite(edges).all()
    assert (edges <= 0).all()


def test_calibration_recovers_a_known_distortion():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.02, 0.98, 6000)
    claimed_logit = (logit(np.log(truth)) + 2.0) / 0.5  # far too sure of itself
    calibration = Calibration(window=4000, prior=1.0)
    for start in range(0, 6000, 50):
        part = slice(start, start + 50)
        calibration.learn(claimed_logit[part], (rng.random(50) < truth[part]).tolist())
    assert calibration.slope == pytest.approx(0.5, abs=0.05)
    assert calibration.intercept == pytest.approx(-2.0, abs=0.15)


def test_the_raw_logit_is_recovered_from_a_calibrated_edge():
    calibration = Calibration()
    calibration.slope, calibration.intercept = 0.7, -1.1
    raw = np.array([-4.0, -0.3, 0.0, 2.5])
    edge = -np.logaddexp(0.0, -(0.7 * raw - 1.1))
    assert calibration.raw_logit(edge) == pytest.approx(raw)


def test_acceptance_without_calibration_leaves_scores_as_drafted():
    acceptance = AcceptanceStats(1, calibrate=False)
    log_prob = np.log([1e-9, 0.5, 1.0])
    acceptance.learn_edges(0, log_prob, [True, False, True])
    assert acceptance.calibrated(0, log_prob) is log_prob


def test_rates_are_moving_averages_of_what_was_recorded():
    acceptance = AcceptanceStats(1)
    assert acceptance.emitted_per_ms == acceptance.round_ms == 0.0
    for _ in range(30):
        acceptance.learn_round(num_emitted=3, num_verified=5, modelled_ms=12.0)
    assert acceptance.emitted_per_ms == pytest.approx(0.25)
    assert acceptance.round_ms == pytest.approx(12.0)
    for _ in range(200):
        acceptance.learn_round(num_emitted=1, num_verified=0, modelled_ms=10.0)
    assert acceptance.emitted_per_ms == pytest.approx(0.1, rel=0.01)
    assert acceptance.last_verified_round == 29

"""What a pipeline knows about itself: what things cost, and how well scores predict acceptance.

`CostModel` outlives requests. `AcceptanceStats` begins anew with each: what one text taught about its drafters need
not hold for the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from treegraft.tree import Floats

P_MIN = 1e-4  # probabilities are clipped to [P_MIN, 1 - P_MIN] before their logit is taken


def _own_floats(values: ArrayLike) -> Floats:
    return np.array(values, dtype=np.float64)


@attrs.define(eq=False)
class LatencyCurve:
    """Latency against rows forwarded: piecewise linear between knots, the last slope beyond them.

    Args:
        rows: ascending row counts, at least one.
        ms: latency (ms) at each.
    """

    rows: Floats = attrs.field(converter=_own_floats)
    ms: Floats = attrs.field(converter=_own_floats)

    def __attrs_post_init__(self) -> None:
        if not len(self.rows) or self.rows.shape != self.ms.shape or (np.diff(self.rows) <= 0).any():
            raise ValueError(f"a latency curve needs ascending rows with one latency each, found {self.table()}")
        if not (np.isfinite(self.ms).all() and (self.ms >= 0).all()):
            raise ValueError(f"latencies must be finite and >= 0 (ms), found {self.ms.tolist()}")

    @classmethod
    def of(cls, value: Any) -> "LatencyCurve":
        """From a number (the same at any size) or a mapping rows -> ms."""
        if isinstance(value, Mapping):
            items = sorted((int(rows), float(ms)) for rows, ms in value.items())
            return cls([rows for rows, _ in items], [ms for _, ms in items])
        return cls([1], [float(value)])

    def __call__(self, rows: ArrayLike) -> Floats:
        """Latency (ms) at `rows`, of the same shape."""
        wanted = np.asarray(rows, dtype=np.float64)
        ms = np.interp(wanted, self.rows, self.ms)
        if len(self.rows) > 1:
            slope = max(0.0, (self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2]))
            ms = ms + slope * np.maximum(wanted - self.rows[-1], 0.0)
        return ms

    def learn(self, rows: int, ms: float, near: float = 0.15, everywhere: float = 0.03) -> None:
        """Move towards a measurement: mostly the knots beside it, a little all (the machine's speed drifts as a whole).

        The ratio to the prediction is clamped to [1/2, 2], so that one hiccup cannot turn a decision.
        """
        predicted = float(self(rows))
        if predicted <= 0:
            self.ms[:] = ms
            return
        error = min(max(ms / predicted, 0.5), 2.0) - 1.0
        right = min(int(np.searchsorted(self.rows, rows)), len(self.rows) - 1)
        left = max(right - 1, 0) if rows < self.rows[right] else right
        span = self.rows[right] - self.rows[left]
        share = (rows - self.rows[left]) / span if span else 1.0
        rate = np.full(len(self.rows), everywhere)
        rate[left] += near * (1.0 - share)
        rate[right] += near * share
        self.ms *= 1.0 + rate * error

    def table(self) -> dict[int, float]:
        """rows -> ms, as `LatencyCurve.of` reads it."""
        return {int(rows): round(float(ms), 4) for rows, ms in zip(self.rows, self.ms, strict=True)}


class CostModel(ABC):
    """Latencies (ms) of a target forward and of a source's drafting step.

    A target's figure covers all that a round takes besides drafting; a source's, all that one step of it takes.
    Decisions use these figures and never the clock, so a run with fixed costs can be repeated exactly.
    """

    @abstractmethod
    def target_ms(self, rows: ArrayLike, context: int) -> Floats:
        """Latency (ms) of a forward of `rows` nodes over `context` committed tokens, of the shape of `rows`."""

    @abstractmethod
    def source_ms(self, name: str, rows: ArrayLike) -> Floats:
        """Latency (ms) of one step of source `name` that forwards `rows` nodes, of the shape of `rows`."""

    @abstractmethod
    def table(self) -> dict[str, Any]:
        """The table in use, as constructor arguments of the cost model `fixed`."""

    def bind(self, target: Any, sources: Sequence[Any]) -> None:
        """Meet the pipeline's TargetModel and Sources, once; the place to measure."""

    def record_target(self, rows: int, context: int, latency_ms: float) -> None:
        """Take in one measured round, drafting excluded."""

    def record_source(self, name: str, rows: int, latency_ms: float) -> None:
        """Take in one measured drafting step."""

    def save(self) -> None:
        """The request is over: keep what was learnt, where that is asked for."""


def best_budget(path_score: Floats, rate: float, target_ms: Floats) -> tuple[int, float]:
    """The number of nodes worth verifying, and what the tree is worth with it (tokens).

    Args:
        path_score: [N], the root's included, in any order (nats).
        rate: emitted tokens per ms that the time could earn otherwise.
        target_ms: [B + 1], latency of a forward of 1 .. B + 1 rows.

    Returns:
        (b, worth): b in [0, B] maximises the expected accepted tokens of the best b nodes, sum of exp(path_score),
        less `rate` times the forward's latency; `worth` is that maximum.
    """
    best = np.sort(path_score)[::-1][: len(target_ms)]  # the root, with score 0, comes first
    accepted = np.cumsum(np.exp(best)) - 1.0
    worth = accepted - rate * target_ms[: len(best)]
    chosen = int(worth.argmax())
    return chosen, float(worth[chosen])


class Calibration:
    """Platt scaling of one source's probabilities: edge = log_sigmoid(slope * logit(p) + intercept).

    Fitted on the last `window` labelled proposals by a Newton step a round, held near the identity by a prior.
    """

    def __init__(self, window: int = 384, prior: float = 2.0):
        self.slope, self.intercept, self._prior = 1.0, 0.0, prior
        self._logits, self._accepted = np.zeros(window), np.zeros(window)
        self._num_seen = 0

    def edge(self, log_prob: Floats) -> Floats:
        """Calibrated edge scores (nats, <= 0) of raw log probabilities."""
        return -np.logaddexp(0.0, -(self.slope * logit(log_prob) + self.intercept))

    def raw_logit(self, edge: Floats) -> Floats:
        """The logit that `edge` was made from: the inverse of `edge()`, as long as nothing was learnt since."""
        raw: Floats = (logit(edge, clip=1e-12) - self.intercept) / self.slope
        return raw

    def learn(self, logits: Floats, accepted: ArrayLike) -> None:
        """Take in labelled proposals: raw logits [E], and whether the target chose each."""
        window = len(self._logits)
        places = np.arange(self._num_seen, self._num_seen + len(logits)) % window
        self._logits[places], self._accepted[places] = logits, accepted
        self._num_seen += len(logits)
        x, y = self._logits[: self._num_seen], self._accepted[: self._num_seen]
        predicted = 1.0 / (1.0 + np.exp(-(self.slope * x + self.intercept)))
        error, curvature = predicted - y, predicted * (1.0 - predicted)
        gradient_slope = float(error @ x) + self._prior * (self.slope - 1.0)
        gradient_intercept = float(error.sum()) + self._prior * self.intercept
        h_ss = float(curvature @ (x * x)) + self._prior
        h_si = float(curvature @ x)
        h_ii = float(curvature.sum()) + self._prior
        determinant = h_ss * h_ii - h_si * h_si
        step_slope = (h_ii * gradient_slope - h_si * gradient_intercept) / determinant
        step_intercept = (h_ss * gradient_intercept - h_si * gradient_slope) / determinant
        # Kept invertible, and short of the overshoot that a Newton step can take far from the optimum.
        self.slope = min(max(self.slope - min(max(step_slope, -0.5), 0.5), 0.1), 4.0)
        self.intercept = min(max(self.intercept - min(max(step_intercept, -1.0), 1.0), -6.0), 6.0)


def logit(log_prob: Floats, clip: float = P_MIN) -> Floats:
    """logit of exp(log_prob), the probability clipped to [clip, 1 - clip]."""
    prob = np.clip(np.exp(log_prob), clip, 1.0 - clip)
    odds: Floats = np.log(prob) - np.log1p(-prob)
    return odds


@attrs.define
class OptionStats:
    """What calling one source at one step has brought so far.

    Attributes:
        gain: moving average of the growth of the tree's worth (tokens), the added verification paid for.
        num_rows: moving average of rows forwarded.
        last_round: the last round in which it was called.
    """

    gain: float
    num_rows: float
    last_round: int


class AcceptanceStats:
    """Online statistics of one request: calibration per source, gain per (source, step), emitted per ms.

    Args:
        num_sources: sources of the pipeline, by index.
        calibrate: False keeps every calibration at the identity and scores as drafted.
    """

    def __init__(self, num_sources: int, calibrate: bool = True):
        self.calibrate = calibrate
        self.calibrations = tuple(Calibration() for _ in range(num_sources))
        self.options: dict[tuple[str, int], OptionStats] = {}
        self.num_rounds = 0
        self.last_verified_round = -1
        self._emitted = self._ms = 0.0

    @property
    def emitted_per_ms(self) -> float:
        """Moving average over about the last 20 rounds; 0.0 before the first."""
        return self._emitted / self._ms if self._ms else 0.0

    @property
    def round_ms(self) -> float:
        """Moving average of a round's modelled latency (ms); 0.0 before the first."""
        weight = (1.0 - _KEEP**self.num_rounds) / (1.0 - _KEEP)
        return self._ms / weight if weight else 0.0

    def calibrated(self, source: int, log_prob: Floats) -> Floats:
        """Edge scores [E] of a source's raw log probabilities [E] (nats, <= 0)."""
        return self.calibrations[source].edge(log_prob) if self.calibrate else log_prob

    def learn_edges(self, source: int, edge_score: Floats, accepted: ArrayLike) -> None:
        """Labels from a finished round: edge scores [E] that `source` gave this round, and the target's choices."""
        if self.calibrate and len(edge_score):
            calibration = self.calibrations[source]
            calibration.learn(calibration.raw_logit(edge_score), accepted)

    def learn_step(self, source: str, step: int, gain: float, num_rows: int) -> None:
        """Record that calling `source` at `step` raised the tree's worth by `gain` (tokens)."""
        option = self.options.get((source, step))
        if option is None:
            self.options[source, step] = OptionStats(gain, num_rows, self.num_rounds)
            return
        option.gain += _LEARN * (gain - option.gain)
        option.num_rows += _LEARN * (num_rows - option.num_rows)
        option.last_round = self.num_rounds

    def learn_round(self, num_emitted: int, num_verified: int, modelled_ms: float) -> None:
        """Close a round: tokens emitted, non-root nodes verified, modelled latency (ms)."""
        self._emitted = _KEEP * self._emitted + num_emitted
        self._ms = _KEEP * self._ms + modelled_ms
        if num_verified:
            self.last_verified_round = self.num_rounds
        self.num_rounds += 1


_KEEP = 0.95  # of emitted and ms, a round
_LEARN = 0.25  # of a new gain

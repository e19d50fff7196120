"""What a pipeline knows about itself: what things cost, and how well scores predict acceptance.

`CostModel` outlives requests. `AcceptanceStats` begins anew with each: what one text taught about its drafters need
not hold for the next.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from treegraft.tree import Floats, Ints

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
        """From a number (the same at any size) or a mapping rows -> ms.

        Raises:
            ValueError: it is neither.
        """
        try:
            items = sorted((int(rows), float(ms)) for rows, ms in value.items()) if isinstance(value, Mapping) else []
            items = items or [(1, float(value))]
        except (TypeError, ValueError) as error:
            raise ValueError(f"a latency (ms) or a mapping rows -> ms is needed, found {value!r:.60}") from error
        if items[0][0] < 1:
            raise ValueError(f"rows must be >= 1, found {items[0][0]}")
        return cls([rows for rows, _ in items], [ms for _, ms in items])

    def __call__(self, rows: ArrayLike) -> Floats:
        """Latency (ms) at `rows`, of the same shape."""
        wanted = np.asarray(rows, dtype=np.float64)
        if len(self.rows) == 1:
            same: Floats = np.zeros(wanted.shape) + self.ms[0]
            return same
        slope = max(0.0, (self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2]))
        beyond = slope * np.maximum(wanted - self.rows[-1], 0.0)
        ms: Floats = np.interp(wanted, self.rows, self.ms) + beyond
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

    def clone(self) -> "CostModel | None":
        """Another one that knows as much and learns apart, bound already; None: it must be made anew instead."""
        return None


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
    """Platt scaling of one source's probabilities, with the depth taken into account.

    edge = log_sigmoid((slope + deep_slope * f) * logit(p) + intercept + deep_intercept * f),
    f = log2(min(depth, 8)) / 3.
    Depth matters because a node is reached only where its parents were accepted, which says that the text is
    predictable there. Fitted on the last `window` labelled proposals, a Newton step every few, held near the identity
    (1, 0, 0, 0) by a prior.
    """

    def __init__(self, window: int = 384, prior: float = 2.0):
        self._weights = _IDENTITY.copy()  # slope, intercept, deep_slope, deep_intercept
        self._prior = prior
        self._features, self._accepted = np.ones((4, window)), np.zeros(window)
        self._num_seen = self._num_fitted = 0
        self._draw_lines()

    def edge(self, log_prob: Floats, depth: Ints) -> Floats:
        """Calibrated edge scores (nats, <= 0) of raw log probabilities [E] at depths [E]."""
        slope, intercept = self._lines_at(depth)
        logits = slope * logit(log_prob)
        logits += intercept
        edges: Floats = np.logaddexp(_ZERO, np.negative(logits, out=logits))
        return np.negative(edges, out=edges)

    def raw_logit(self, edge: Floats, depth: Ints) -> Floats:
        """The logit that `edge` was made from: the inverse of `edge()`, as long as nothing was learnt since."""
        slope, intercept = self._lines_at(depth)
        raw: Floats = (logit(edge, _WIDE) - intercept) / slope
        return raw

    def learn(self, logits: Floats, depth: Ints, accepted: ArrayLike) -> None:
        """Take in labelled proposals: raw logits [E], depths [E], and whether the target chose each."""
        feature = _FEATURE.take(depth, mode="clip")
        window = len(self._accepted)
        places = np.arange(self._num_seen, self._num_seen + len(logits)) % window
        self._features[0, places], self._features[2, places], self._features[3, places] = (
            logits, feature * logits, feature
        )  # fmt: skip
        self._accepted[places] = accepted
        self._num_seen += len(logits)
        if self._num_seen - self._num_fitted < max(FIT_EVERY, FIT_SHARE * min(self._num_seen, window)):
            return
        self._num_fitted = self._num_seen
        x, y = self._features[:, : self._num_seen], self._accepted[: self._num_seen]
        predicted = 1.0 / (1.0 + np.exp(-(self._weights @ x)))
        gradient = x @ (predicted - y) + self._prior * (self._weights - _IDENTITY)
        curvature = (x * (predicted * (1.0 - predicted))) @ x.T + self._prior * _UNIT
        step = np.linalg.solve(curvature, gradient)
        # Short of the overshoot that a Newton step can take far from the optimum, and with slopes that stay positive
        # at every depth: a likelier token must not become the worse one.
        step = np.minimum(np.maximum(step, -0.5), 0.5)
        self._weights = np.minimum(np.maximum(self._weights - step, _LOWEST), _HIGHEST)
        self._weights[2] = max(self._weights[2], MIN_SLOPE - self._weights[0])

        self._draw_lines()

    def _draw_lines(self) -> None:
        line, deep_line = self._weights.reshape(2, 2, 1)
        self._lines = line + deep_line * _FEATURE

    def _lines_at(self, depth: Ints) -> Floats:
        """Slope and intercept [2, E] at each depth [E]."""
        lines: Floats = self._lines.take(depth, axis=1, mode="clip")
        return lines


FIT_EVERY, FIT_SHARE = 24, 0.125  # labels, and a share of those fitted on: enough new ones to change something
MIN_SLOPE = 0.1
_IDENTITY = np.array([1.0, 0.0, 0.0, 0.0])
_UNIT = np.eye(4)
_LOWEST = np.array([MIN_SLOPE, -6.0, -4.0, -6.0])
_HIGHEST = np.array([4.0, 6.0, 4.0, 6.0])


_DEEPEST = 8
# By depth: from 0 at depth 1 to 1 at depth 8 and below, on a logarithmic scale. The root's is never read.
_FEATURE = np.log2(np.maximum(np.arange(_DEEPEST + 1), 1)) / np.log2(_DEEPEST)


def _clip(p_min: float) -> tuple[Floats, Floats]:
    """The logs of `p_min` and of 1 - `p_min`; as arrays, since converting a number takes longer than using it."""
    return np.array(math.log(p_min)), np.array(math.log1p(-p_min))


_NARROW, _WIDE, _ZERO = _clip(P_MIN), _clip(1e-12), np.array(0.0)


def logit(log_prob: Floats, clip: tuple[Floats, Floats] = _NARROW) -> Floats:
    """logit of exp(log_prob), which is clipped to `clip`: by default its probability to [P_MIN, 1 - P_MIN]."""
    lowest, highest = clip
    clipped = np.minimum(np.maximum(log_prob, lowest), highest)
    odds: Floats = clipped - np.log(-np.expm1(clipped))
    return odds


@attrs.define
class OptionStats:
    """What calling one source at one step has brought so far.

    Attributes:
        gain: moving average of the growth of the tree's worth (tokens), the added verification paid for, for each
            unit of probability mass that the source drafted below.
        num_rows: moving average of rows forwarded.
        last_round: the last round in which it was called.
        num_calls: how often it was called.
    """

    gain: float = 1.0  # hopeful until tried: an option left out teaches nothing
    num_rows: float = 0.0
    last_round: int = 0
    num_calls: int = 0


Option = tuple[str, int, bool]
"""A source's name, the step, and whether the round before accepted anything."""


class AcceptanceStats:
    """Online statistics of one request: calibration per source, gain per option, emitted per ms.

    Args:
        num_sources: sources of the pipeline, by index.
        calibrate: False keeps every calibration at the identity and scores as drafted.
    """

    def __init__(self, num_sources: int, calibrate: bool = True):
        self.calibrate = calibrate
        self.calibrations = tuple(Calibration() for _ in range(num_sources))
        self._options: dict[Option, OptionStats] = {}
        self.are_options_read = False
        self.last_accepted = 0  # draft tokens kept in the last round
        self.num_rounds = 0
        self.last_verified_round = -1
        self._emitted = self._ms = 0.0

    @property
    def options(self) -> Mapping[Option, OptionStats]:
        """What calling each source at each step has brought so far.

        It is learnt in those rounds only in which it is read, `are_options_read`: it costs some 2 % of a round.
        """
        self.are_options_read = True
        return self._options

    @property
    def is_hot(self) -> bool:
        """Whether the last round accepted something; what can be guessed comes in runs."""
        return self.last_accepted > 0

    @property
    def emitted_per_ms(self) -> float:
        """Moving average over about the last 20 rounds; 0.0 before the first."""
        return self._emitted / self._ms if self._ms else 0.0

    @property
    def emitted_per_round(self) -> float:
        """Moving average over about the last 20 rounds; 0.0 before the first."""
        return self._emitted / self._weight if self._weight else 0.0

    @property
    def round_ms(self) -> float:
        """Moving average of a round's modelled latency (ms); 0.0 before the first."""
        return self._ms / self._weight if self._weight else 0.0

    @property
    def _weight(self) -> float:
        return (1.0 - _KEEP**self.num_rounds) / (1.0 - _KEEP)

    def calibrated(self, source: int, log_prob: Floats, depth: Ints) -> Floats:
        """Edge scores [E] of a source's raw log probabilities [E] (nats, <= 0) for nodes at `depth` [E]."""
        return self.calibrations[source].edge(log_prob, depth) if self.calibrate else log_prob

    def learn_edges(self, source: int, edge_score: Floats, depth: Ints, accepted: ArrayLike) -> None:
        """Labels from a finished round: edge scores [E] that `source` gave this round, and the target's choices."""
        if self.calibrate and len(edge_score):
            calibration = self.calibrations[source]
            calibration.learn(calibration.raw_logit(edge_score, depth), depth, accepted)

    def learn_step(self, source: str, step: int, gain: float, num_rows: int) -> None:
        """Record a call of `source` at `step` of the current round.

        Args:
            gain: growth of the tree's worth (tokens) for each unit of mass drafted below.
            num_rows: rows forwarded.
        """
        option = self._options.setdefault((source, step, self.is_hot), OptionStats())
        option.num_calls += 1
        rate = max(1.0 / option.num_calls, _LEARN)
        option.gain += rate * (gain - option.gain)
        option.num_rows += rate * (num_rows - option.num_rows)
        option.last_round = self.num_rounds

    def learn_round(self, num_emitted: int, num_accepted: int, num_verified: int, modelled_ms: float) -> None:
        """Close a round: tokens emitted, draft tokens accepted, non-root nodes verified, modelled latency (ms)."""
        self.are_options_read = False
        self.last_accepted = num_accepted
        self._emitted = _KEEP * self._emitted + num_emitted
        self._ms = _KEEP * self._ms + modelled_ms
        if num_verified:
            self.last_verified_round = self.num_rounds
        self.num_rounds += 1


_KEEP = 0.95  # of emitted and ms, a round
_LEARN = 0.1  # of a new gain, once there are enough

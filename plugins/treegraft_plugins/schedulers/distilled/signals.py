"""What the scheduler sees of a state: the runtime, the round's progress, and fifteen candidate signals of the tree.

Everything here is finite for every tree, and a function of the RoundState alone: the same code computes what is fitted
and what is read online.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from treegraft.interfaces import RoundState, Source, StepRecord
from treegraft.tree import Bools, Floats, Ints

NUM_RUNTIME = 4
RATIO, SPEED = 0, 2  # places in the runtime context
LEAST_SCORE = -30.0  # a path score (nats) below which nothing is ever verified


class TreeSignals:
    """The candidate signals of one state, computed as they are asked for.

    The *frontier* is what the small source would draft below: the nodes of the last step that made any. The *pool* is
    what the middle would choose from, and the *selected* nodes are the best `width` of it by path score.

    Args:
        state: before the action.
        middle: the stronger source.

    Source: TreeGraft, appendix B (tree signals); the candidates beyond its six are treegraft's own.
    """

    def __init__(self, state: RoundState, middle: Source):
        self._state, self._tree, self._middle = state, state.tree, middle

    # -- what several signals read ------------------------------------------------------------------------------------

    @cached_property
    def _path_score(self) -> Floats:
        return np.maximum(self._tree.path_score, LEAST_SCORE)

    @cached_property
    def _first(self) -> int:
        """The first row of the frontier: what a step makes stands behind all that was there before."""
        step = self._tree.step
        return int(step.searchsorted(step[-1]))

    @cached_property
    def _frontier_depth(self) -> Ints:
        return self._tree.depth[self._first :]

    @cached_property
    def _mean_depth(self) -> float:
        return _mean(self._frontier_depth)

    @cached_property
    def _pool(self) -> Ints:
        return self._middle.selector.candidates(self._tree, self._middle)

    @cached_property
    def _selected(self) -> Ints:
        pool, width = self._pool, self._middle.width
        if len(pool) <= width:
            return pool
        return pool[np.argpartition(self._path_score[pool], -width)[-width:]]

    @cached_property
    def _selected_depth(self) -> Ints:
        return self._tree.depth[self._selected]

    # -- the six of the paper's released weights ----------------------------------------------------------------------

    def frontier_depth(self) -> float:
        """Mean depth of the frontier."""
        return self._mean_depth

    def frontier_leaf_share(self) -> float:
        """Share of frontier nodes without children."""
        is_inner = np.zeros(len(self._tree), np.bool_)
        is_inner[self._tree.parent[1:]] = True
        return 1.0 - _mean(is_inner[self._first :])

    def selected_shallower(self) -> float:
        """How much shallower on average the selected nodes are than the frontier; zero if they are deeper."""
        return max(0.0, self._mean_depth - _mean(self._selected_depth)) if len(self._selected) else 0.0

    def selected_outside_share(self) -> float:
        """Share of the selected nodes at depths outside the frontier's."""
        depth, frontier = self._selected_depth, self._frontier_depth
        return _mean((depth < frontier.min()) | (depth > frontier.max()))

    def selected_in_frontier_share(self) -> float:
        """Share of the selected nodes that lie in the frontier."""
        return _mean(self._selected >= self._first)

    def selected_score(self) -> float:
        """Mean path score of the selected nodes (nats)."""
        return _mean(self._path_score[self._selected]) if len(self._selected) else LEAST_SCORE

    # -- other candidates ---------------------------------------------------------------------------------------------

    def frontier_size(self) -> float:
        """log(1 + nodes in the frontier)."""
        return math.log1p(len(self._frontier_depth))

    def tree_size(self) -> float:
        """log(nodes of the tree, the root included)."""
        return math.log(len(self._tree))

    def pool_size(self) -> float:
        """log(1 + nodes in the pool)."""
        return math.log1p(len(self._pool))

    def expected_accepted(self) -> float:
        """Expected accepted tokens: the sum of exp(path score) over the best B nodes."""
        return self._expected(self._path_score)

    def expected_growth(self) -> float:
        """By how much the last step raised the expected accepted tokens."""
        if not self._state.steps:
            return 0.0
        before = self._state.steps[-1].tree_before
        return self._expected(self._path_score) - self._expected(np.maximum(before.path_score, LEAST_SCORE))

    def frontier_entropy(self) -> float:
        """Entropy (nats) of the frontier's path probabilities, normalised."""
        score = self._path_score[self._first :]
        below = score - score.max()
        mass = np.exp(below)
        total = float(np.add.reduce(mass))
        return max(0.0, math.log(total) - float(mass @ below) / total)

    def unvisited_mass(self) -> float:
        """Probability mass of the selected nodes."""
        return float(np.exp(self._path_score[self._selected]).sum())

    def match_confidence(self) -> float:
        """What the last lookup said of its best proposal; 0 without one."""
        for step in reversed(self._state.steps):
            if "match_confidence" in step.expansion.signals:
                return float(step.expansion.signals["match_confidence"])
        return 0.0

    def disagreement(self) -> float:
        """Mean change (nats) of edge scores at the last rescoring; 0 without one."""
        for step in reversed(self._state.steps):
            if len(step.rescored):
                return _rescoring_change(step)
        return 0.0

    def _expected(self, path_score: Floats) -> float:
        size = self._state.limits.verify_nodes + 1
        best = path_score if len(path_score) <= size else np.partition(path_score, -size)[-size:]
        return float(np.exp(best).sum()) - 1.0


def _mean(values: Floats | Ints | Bools) -> float:
    """The mean, 0 of nothing; in half the time of numpy's own."""
    return float(np.add.reduce(values)) / len(values) if len(values) else 0.0


def _rescoring_change(step: StepRecord) -> float:
    before, after, rows = step.tree_before, step.tree, step.rescored
    rows = rows[rows < len(after)]
    rows = rows[after.uid[rows] == before.uid[rows]]  # a graft that overwrites moves rows
    if not len(rows):
        return 0.0
    return float(np.minimum(np.abs(after.edge_score[rows] - before.edge_score[rows]), -LEAST_SCORE).mean())


Signal = Callable[[TreeSignals], float]

CANDIDATES: Mapping[str, Signal] = {
    signal.__name__: signal
    for signal in (
        TreeSignals.frontier_depth,
        TreeSignals.frontier_leaf_share,
        TreeSignals.selected_shallower,
        TreeSignals.selected_outside_share,
        TreeSignals.selected_in_frontier_share,
        TreeSignals.selected_score,
        TreeSignals.frontier_size,
        TreeSignals.tree_size,
        TreeSignals.pool_size,
        TreeSignals.expected_accepted,
        TreeSignals.expected_growth,
        TreeSignals.frontier_entropy,
        TreeSignals.unvisited_mass,
        TreeSignals.match_confidence,
        TreeSignals.disagreement,
    )
}
"""The fifteen candidates by name, in the order in which they are recorded."""


def tree_signals(state: RoundState, middle: Source, names: Sequence[str]) -> list[float]:
    """The signals of `names`, in that order."""
    signals = TreeSignals(state, middle)
    return [CANDIDATES[name](signals) for name in names]


def runtime(plain_ms: float, target_ms: float, middle_ms: float, missed_ms: float, rate: float) -> list[float]:
    """The runtime context (4 logarithms): what calls, nodes, time, and tokens to catch up with are worth.

    Args:
        plain_ms: latency of a target forward of one row (ms).
        target_ms: latency of one of B + 1 rows (ms).
        middle_ms: latency of a middle step of `width` rows (ms).
        missed_ms: latency of one more row of it (ms).
        rate: emitted tokens per ms that time is worth.

    Source: TreeGraft, appendix B, which reads latencies themselves and the prompt's length. Those tell apart the few
    machines and datasets that were fitted to, and nothing that would hold for another one.
    """
    values = (target_ms / middle_ms, target_ms / plain_ms, rate * target_ms, rate * missed_ms)
    return [math.log(max(value, 1e-3)) for value in values]


def progress(history: Sequence[bool], steps: int) -> list[float]:
    """Progress and history (2 + D numbers): step / D, calls so far / D, and a flag a step: the middle was called."""
    flags = [float(called) for called in history]
    return [len(flags) / steps, sum(flags) / steps, *flags, *[0.0] * (steps - len(flags))]


def suffix_flags(suffix: Sequence[bool], steps: int) -> list[float]:
    """The rest of a schedule (D + 1 numbers): a flag a step where it will call, and their count / D."""
    flags = [float(called) for called in suffix]
    return [*[0.0] * (steps - len(flags)), *flags, sum(flags) / steps]

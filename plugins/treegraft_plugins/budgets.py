"""How many nodes of a tree are worth verifying."""

from typing import ClassVar

import attrs
import numpy as np

from treegraft.interfaces import BudgetChoice, BudgetPolicy, RoundState
from treegraft.statistics import best_budget
from treegraft.tree import DraftTree, Floats, Ints
from treegraft_plugins.options import number, whole


@attrs.frozen
class FixedBudget(BudgetPolicy):
    """The same budget every round, whatever it costs.

    Args:
        verify_nodes: B, most non-root nodes to verify; 0 decodes plainly.
    """

    verifies_all: ClassVar[bool] = True

    max_verify_nodes: int = attrs.field(default=63, alias="verify_nodes", validator=whole(0))

    def max_nodes(self, state: RoundState) -> int:
        return self.max_verify_nodes

    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        return min(self.max_verify_nodes, len(tree) - 1)


@attrs.frozen
class GainOverCostBudget(BudgetPolicy):
    """The budget that is worth most: expected accepted tokens, less what the forward's time could earn otherwise.

    Where that is none for long, the best non-empty budget is probed now and then, so that plain decoding is not
    absorbing.

    Args:
        verify_nodes: B, most non-root nodes ever verified.
        probe_every: rounds without verification after which one is probed, at the earliest.
        probe_share: most of the time that probes may take.

    Source: treegraft's own; the rule of CaDDTree in another form.
    """

    max_verify_nodes: int = attrs.field(default=63, alias="verify_nodes", validator=whole(0))
    probe_every: int = attrs.field(default=32, validator=whole(1))
    probe_share: float = attrs.field(default=0.03, validator=number(0.0))

    def max_nodes(self, state: RoundState) -> int:
        """The nodes that even certain acceptance could pay for: one token a node against its share of the forward."""
        certain = np.zeros(self.max_verify_nodes + 1)
        return best_budget(certain, state.statistics.rate(state.position), self._target_ms(state))[0]

    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        acceptance, rate = state.statistics.acceptance, state.statistics.rate(state.position)
        target_ms = self._target_ms(state)
        budget, _ = best_budget(tree.path_score, rate, target_ms)
        if budget or not self.max_verify_nodes or len(tree) == 1:
            return budget
        idle = acceptance.num_rounds - acceptance.last_verified_round
        some, _ = best_budget(tree.path_score, rate, np.append(np.inf, target_ms[1:]))
        extra_ms = float(target_ms[some] - target_ms[0])
        affordable = extra_ms / max(self.probe_share * acceptance.round_ms, 1e-9)
        return some if idle >= max(self.probe_every, affordable) else 0

    def _target_ms(self, state: RoundState) -> Floats:
        rows = np.arange(1, self.max_verify_nodes + 2)
        return state.statistics.costs.target_ms(rows, state.position)


@attrs.frozen
class ExpectedGainBudget(BudgetPolicy):
    """The budget with the most expected tokens per ms of the round, drafting included, by the tree's own scores.

    What is expected of the best B nodes is the sum of exp(path_score), and the target's own token. Nothing is fitted.

    Args:
        verify_nodes: B, most non-root nodes ever verified.

    Source: CaDDTree's rule, which stops adding nodes when the ratio stops rising; here the highest of all is taken,
    which is the same where a node more never costs less than the one before it.
    """

    max_verify_nodes: int = attrs.field(default=63, alias="verify_nodes", validator=whole(0))

    def max_nodes(self, state: RoundState) -> int:
        return self.max_verify_nodes

    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        return self.choose(state, tree).nodes

    def choose(self, state: RoundState, tree: DraftTree) -> BudgetChoice:
        gain = expected_accepted(tree, self.max_verify_nodes)
        return fastest(state, np.arange(len(gain)), gain)


def expected_accepted(tree: DraftTree, most: int) -> Floats:
    """float64 [B + 1]: draft tokens expected of the best 0 .. B nodes, B = min(`most`, nodes of the tree)."""
    best = np.sort(tree.path_score)[::-1][: most + 1]  # the root, with score 0, comes first
    expected: Floats = np.cumsum(np.exp(best)) - 1.0
    return expected


def fastest(state: RoundState, budgets: Ints, gain: Floats) -> BudgetChoice:
    """The budget with the most tokens per ms of the whole round, of equals the smallest.

    Args:
        state: after growth.
        budgets: int [G].
        gain: float64 [G], draft tokens expected to be accepted under each.
    """
    cost_ms = round_ms(state, budgets)
    best = int(((1.0 + gain) / np.maximum(cost_ms, _LEAST_MS)).argmax())
    return BudgetChoice(int(budgets[best]), float(gain[best]), float(cost_ms[best]))


def round_ms(state: RoundState, budgets: Ints) -> Floats:
    """float64 [G]: modelled latency (ms) of the whole round under each of `budgets` [G], drafting included."""
    costs = state.statistics.costs
    drafting_ms = sum(float(costs.source_ms(step.source, step.num_rows)) for step in state.steps if len(step.positions))
    total: Floats = costs.target_ms(budgets + 1, state.position) + drafting_ms
    return total


_LEAST_MS = 1e-9  # of a round under tables in which nothing costs anything

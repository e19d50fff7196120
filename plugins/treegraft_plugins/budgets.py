"""How many nodes of a tree are worth verifying."""

import attrs
import numpy as np

from treegraft.interfaces import BudgetPolicy, RoundState
from treegraft.statistics import best_budget
from treegraft.tree import DraftTree, Floats
from treegraft_plugins.options import number, whole


@attrs.frozen
class FixedBudget(BudgetPolicy):
    """The same budget every round, whatever it costs.

    Args:
        verify_nodes: B, most non-root nodes to verify; 0 decodes plainly.
    """

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

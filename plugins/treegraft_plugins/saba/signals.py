"""What the budget sees of a round after growth: a function of the state and the statistics alone, finite or missing.

The same code computes what is fitted and what is read online.
"""

from collections.abc import Sequence

import numpy as np

from treegraft.interfaces import RoundState
from treegraft.tree import DraftTree, Floats
from treegraft_plugins.budgets import expected_accepted

DRAFTED = ("mean_top1", "chain_prob", "entropy", "adjacent_cosine", "repeated_argmax", "effective_rank")
"""What a one-pass drafter says about its block: how sure it is, and whether its places have become alike."""

OWN = ("recent_accepted", "last_accepted", "context", "expected_4", "expected_16", "expected_all")
"""What every round has: draft tokens kept in the last rounds (moving average) and in the last one; the logarithm of the
committed tokens; those of what the tree's own scores expect of its best 4 and 16 nodes, and of all that may be
verified: what a budget brings is, in the main, some share of it."""

SIGNALS = (*DRAFTED, *OWN)
_LEAST_EXPECTED = 0.01  # draft tokens: fewer are as good as none


def state_signals(state: RoundState, tree: DraftTree, names: Sequence[str]) -> Floats:
    """float64 [S]: the signals of `names`, NaN where no drafter of the round said one.

    Source: GRAFT (SABA); what the tree's scores expect is treegraft's own, for trees of any sources.
    """
    acceptance = state.statistics.acceptance
    expected = np.log(np.maximum(expected_accepted(tree, state.limits.verify_nodes), _LEAST_EXPECTED))
    said = {
        "recent_accepted": max(acceptance.emitted_per_round - 1.0, 0.0),
        "last_accepted": acceptance.last_accepted,
        "context": np.log1p(state.position),
        "expected_4": expected[:5][-1],
        "expected_16": expected[:17][-1],
        "expected_all": expected[-1],
    }
    for step in state.steps:
        said.update(step.expansion.signals)
    return np.array([said.get(name, np.nan) for name in names], np.float64)

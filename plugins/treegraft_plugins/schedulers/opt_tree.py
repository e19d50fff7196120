"""Drafting until a step no longer raises the expected accepted length by enough."""

import attrs
import numpy as np

from treegraft.interfaces import RoundState, Scheduler, Setting
from treegraft.tree import DraftTree
from treegraft_plugins.options import number
from treegraft_plugins.schedulers.fixed import FixedScheduler


@attrs.frozen
class OptTreeScheduler(Scheduler):
    """Grow while the last step raised the tree's expected accepted length by more than `threshold`.

    That length is the sum of exp(path_score) over the best B nodes, B being the most that the budget ever verifies.
    The first step is always taken. A step that adds nothing raises nothing, so growth ends there.

    Args:
        pattern: names of the sources to call in turn, repeated, as in `fixed`; one name is the paper's single drafter.
        threshold: tokens. A step pays for itself from about its latency as a share of the target's.

    Source: OPT-Tree, arXiv 2406.17276.
    """

    pattern: tuple[str | None, ...]
    threshold: float = attrs.field(default=0.2, validator=number(0.0))
    _in_turn: FixedScheduler = attrs.field(
        init=False, repr=False, default=attrs.Factory(lambda self: FixedScheduler(self.pattern), takes_self=True)
    )

    def decide(self, state: RoundState) -> str | None:
        if state.steps:
            last, num_nodes = state.steps[-1], state.limits.verify_nodes
            rise = expected_accepted(last.tree, num_nodes) - expected_accepted(last.tree_before, num_nodes)
            if rise <= self.threshold:
                return None
        return self._in_turn.decide(state)

    def bind(self, setting: Setting) -> None:
        self._in_turn.bind(setting)


def expected_accepted(tree: DraftTree, num_nodes: int) -> float:
    """Draft tokens that are expected to be accepted if the best `num_nodes` non-root nodes are verified."""
    return float(np.sort(np.exp(tree.path_score[1:]))[::-1][:num_nodes].sum())

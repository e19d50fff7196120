"""Which nodes of a grown tree are verified."""

import attrs
import numpy as np

from treegraft.interfaces import Pruner
from treegraft.tree import Bools, DraftTree


@attrs.frozen
class TopPaths(Pruner):
    """The best nodes by path score.

    Edges never score above zero, so the best n nodes are ancestor-closed, and smaller budgets keep subsets of larger.

    Source: EAGLE-2, section 4.2 (reranking phase).
    """

    def prune(self, tree: DraftTree, num_nodes: int) -> Bools:
        kept = np.zeros(len(tree), dtype=np.bool_)
        kept[tree.ranked()[: num_nodes + 1]] = True
        return kept

"""How proposals join the shared tree."""

from typing import ClassVar

import attrs
import numpy as np

from treegraft.interfaces import GraftPolicy, Source
from treegraft.tree import Bools, DraftTree, Expansion


@attrs.frozen
class NonDestructive(GraftPolicy):
    """Children join beside existing ones; a child proposed twice is one node, and its subtree stays.

    Source: TreeGraft.
    """

    keeps_existing: ClassVar[bool] = True

    def graft(self, tree: DraftTree, expansion: Expansion, source: Source) -> DraftTree:
        return tree.append(expansion, source.index, source.overrules)


@attrs.frozen
class Overwrite(GraftPolicy):
    """The expanded nodes' existing children go first, with their subtrees: the ablation of `non_destructive`.

    A child that is proposed again begins anew, without subtree, visitors or earlier scores. What stays is what the
    expansion hangs on: the expanded nodes and the nodes above them, where one expanded node lies below another.

    Source: TreeGraft, ablations.
    """

    keeps_existing: ClassVar[bool] = False

    def graft(self, tree: DraftTree, expansion: Expansion, source: Source) -> DraftTree:
        if not len(expansion):
            return tree
        kept = _without_children(tree, expansion)
        new_row = np.cumsum(kept) - 1
        anchor = np.where(expansion.anchor >= 0, new_row[np.maximum(expansion.anchor, 0)], expansion.anchor)
        return tree.keep(kept).append(attrs.evolve(expansion, anchor=anchor), source.index, source.overrules)


def _without_children(tree: DraftTree, expansion: Expansion) -> Bools:
    """bool [N]: the nodes that remain when the expanded nodes lose their children."""
    expanded = {row for row in expansion.anchor.tolist() if row >= 0}
    needed = {row for position in expanded for row in tree.path(position)}
    kept: list[bool] = []
    for row, parent in enumerate(tree.parent.tolist()):
        kept.append(row in needed or (kept[parent] and parent not in expanded))
    return np.array(kept, dtype=np.bool_)

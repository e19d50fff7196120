"""From a tree's topology to what a forward pass needs: who sees whom, and at which position."""

import numpy as np

from treegraft.tree import Bools, DraftTree, Ints


def ancestor_mask(tree: DraftTree) -> Bools:
    """bool [N, N]: entry (i, j) is True where node i sees node j, that is, j is i or one of its ancestors."""
    mask = np.eye(len(tree), dtype=np.bool_)
    for row, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def positions(tree: DraftTree, root_position: int) -> Ints:
    """int64 [N]: the sequence position of every node; siblings share theirs.

    Args:
        tree: N nodes.
        root_position: tokens before the root, that is, the length of the target's cache.
    """
    return tree.depth.astype(np.int64) + root_position

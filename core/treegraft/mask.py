"""From a tree's topology to what a forward pass needs: who sees whom, and at which position."""

import numpy as np

from treegraft.tree import Bools, DraftTree, Ints


def ancestor_mask(tree: DraftTree) -> Bools:
    """bool [N, N]: entry (i, j) is True where node i sees node j, that is, j is i or one of its ancestors."""
    size = len(tree)
    mask = np.zeros((size, size), dtype=np.bool_)
    mask.flat[:: size + 1] = True
    for row, parent in enumerate(tree.parent[1:].tolist(), 1):
        mask[row] |= mask[parent]
    return mask


def positions(tree: DraftTree, root_position: int) -> Ints:
    """int64 [N]: the sequence position of every node; siblings share theirs.

    Args:
        tree: N nodes.
        root_position: tokens before the root, that is, the length of the target's cache.
    """
    return tree.depth + root_position

"""From topology to masks and positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treegraft.mask import ancestor_mask, positions
from treegraft.testing.strategies import draft_trees
from treegraft.tree import DraftTree, Expansion


@given(draft_trees())
def test_a_node_sees_its_path_and_nothing_else(tree):
    mask = ancestor_mask(tree)
    assert mask.dtype == np.bool_ and mask.shape == (len(tree), len(tree))
    for row in range(len(tree)):
        assert np.flatnonzero(mask[row]).tolist() == tree.path(row)


@given(draft_trees(), st.integers(0, 10**6))
def test_positions_are_those_of_the_path_alone(tree, root_position):
    found = positions(tree, root_position)
    assert found.tolist() == [root_position + len(tree.path(row)) - 1 for row in range(len(tree))]


def test_a_small_tree():
    tree = DraftTree.rooted(0).append(Expansion([0, 0, -1], [1, 2, 1], [-1.0] * 3), 0, [True])
    assert ancestor_mask(tree).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert positions(tree, 10).tolist() == [10, 11, 11, 12]

"""Pruner top_paths: rules P1 to P3, and the best nodes indeed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treegraft.testing.strategies import draft_trees
from treegraft_plugins.pruners import TopPaths


@given(draft_trees(max_steps=4), st.integers(0, 12))
def test_p1_ancestor_closed_p2_within_budget_p3_nested(tree, num_nodes):
    kept = TopPaths().prune(tree, num_nodes)
    assert kept.dtype == np.bool_ and kept.shape == (len(tree),)
    assert kept[0] and kept[tree.parent[1:]][kept[1:]].all()
    assert kept.sum() == min(num_nodes, len(tree) - 1) + 1
    assert (kept <= TopPaths().prune(tree, num_nodes + 1)).all()
    tree.keep(kept).check()


@given(draft_trees(max_steps=4), st.integers(0, 12))
def test_nothing_dropped_scores_better_than_anything_kept(tree, num_nodes):
    kept = TopPaths().prune(tree, num_nodes)
    assert tree.path_score[kept].min() >= tree.path_score[~kept].max(initial=-np.inf)

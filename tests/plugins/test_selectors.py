"""Selectors: newest and unvisited, rules S1 and S2."""

import numpy as np
import pytest
from bare_parts import bare_source
from hypothesis import given
from hypothesis import strategies as st

from treegraft.testing.strategies import draft_trees
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.selectors import NewestSelector, UnvisitedSelector


@pytest.fixture(scope="module")
def three_steps() -> DraftTree:
    """Rows 0 - root, 1 2 - step 0 by source 0, 3 - step 1 by source 1 at row 1, then a step that adds nothing."""
    tree = DraftTree.rooted(7).mark(np.array([0]), 0)
    tree = tree.append(Expansion.from_rows({0: [(1, -0.1), (2, -0.2)]}), 0, [True, False])
    tree = tree.mark(np.array([1]), 1).append(Expansion.from_rows({1: [(3, -0.1)]}), 1, [True, True])
    return tree.mark(np.array([2]), 0)


@pytest.mark.parametrize("selector", [NewestSelector(), UnvisitedSelector()])
@given(draft_trees(), st.integers(0, 1))
def test_s1_rows_are_ascending_distinct_and_in_range_and_s2_repeatable(selector, tree, index):
    rows = selector.candidates(tree, bare_source(index))
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    assert ((rows >= 0) & (rows < len(tree))).all()
    assert np.array_equal(rows, selector.candidates(tree, bare_source(index)))
    assert not tree.visited_by(index)[rows].any()


@pytest.mark.parametrize("selector", [NewestSelector(), UnvisitedSelector()])
def test_step_one_offers_the_root(selector):
    assert selector.candidates(DraftTree.rooted(7), bare_source()).tolist() == [0]


def test_newest_is_the_last_step_that_created_nodes(three_steps):
    assert NewestSelector().candidates(three_steps, bare_source(0)).tolist() == [3]
    assert NewestSelector().candidates(three_steps, bare_source(1)).tolist() == [3]
    seen = three_steps.mark(np.array([3]), 0)
    assert NewestSelector().candidates(seen, bare_source(0)).tolist() == []
    assert NewestSelector().candidates(seen, bare_source(1)).tolist() == [3]


def test_unvisited_is_every_node_the_source_has_not_expanded(three_steps):
    assert UnvisitedSelector().candidates(three_steps, bare_source(0)).tolist() == [1, 3]
    assert UnvisitedSelector().candidates(three_steps, bare_source(1)).tolist() == [0, 2, 3]

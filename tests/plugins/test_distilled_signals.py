"""The candidate signals: what each says of a tree whose figures are known, and that all are finite for any tree."""

import math

import attrs
import numpy as np
import pytest
from bare_parts import bare_source, bare_state
from hypothesis import given

from treegraft.interfaces import Limits, StepRecord
from treegraft.testing.strategies import draft_trees
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES, LEAST_SCORE, tree_signals
from treegraft_plugins.selectors import UnvisitedSelector

MIDDLE = attrs.evolve(bare_source(1), name="middle", selector=UnvisitedSelector(), width=3)
HALF, EIGHTH = math.log(0.5), math.log(0.125)


def step(before: DraftTree, after: DraftTree, expansion: Expansion, rescored=()) -> StepRecord:
    return StepRecord("small", before, after, np.zeros(1, np.int64), expansion, np.array(rescored, np.int64), 0, 0.0)


@pytest.fixture
def state():
    """After two steps: probabilities .5 and .125 below the root; below the first .25 and .0625, below that one .125."""
    tree, steps = DraftTree.rooted(0), []
    for row, expansion in (
        (0, Expansion([0, 0], [1, 2], [HALF, EIGHTH], signals={"match_confidence": 0.7})),
        (1, Expansion([1, 1, -1], [3, 4, 5], [HALF, EIGHTH, HALF])),
    ):
        grown = tree.mark(np.array([row]), 0).append(expansion, 0, (True, True))
        steps.append(step(tree, grown, expansion))
        tree = grown
    return attrs.evolve(bare_state(tree=tree), steps=tuple(steps))


def told(state, middle=MIDDLE) -> dict[str, float]:
    return dict(zip(CANDIDATES, tree_signals(state, middle, list(CANDIDATES)), strict=True))


def test_each_says_what_its_name_says(state):
    shares = np.array([4, 1, 2]) / 7
    assert told(state) == pytest.approx(
        {
            "frontier_depth": 7 / 3,  # of depths 2, 2 and 3
            "frontier_leaf_share": 2 / 3,
            "selected_shallower": 7 / 3 - 1,  # the root, its first child, and that one's: depths 0, 1 and 2
            "selected_outside_share": 2 / 3,
            "selected_in_frontier_share": 1 / 3,
            "selected_score": HALF,
            "frontier_size": math.log(4),
            "tree_size": math.log(6),
            "pool_size": math.log(7),
            "expected_accepted": 0.5 + 0.125 + 0.25 + 0.0625 + 0.125,
            "expected_growth": 0.25 + 0.0625 + 0.125,
            "frontier_entropy": -(shares * np.log(shares)).sum(),
            "unvisited_mass": 1.75,
            "match_confidence": 0.7,
            "disagreement": 0.0,
        }
    )


def test_only_the_nodes_that_can_be_verified_are_expected(state):
    few = attrs.evolve(state, limits=Limits(steps=5, verify_nodes=2, max_depth=9))
    assert told(few)["expected_accepted"] == pytest.approx(0.75)
    assert told(few)["expected_growth"] == pytest.approx(0.75 - 0.625)


def test_what_the_middle_has_visited_is_no_longer_selected(state):
    visited = attrs.evolve(state, tree=state.tree.mark(np.array([0, 1]), 1))
    assert told(visited)["pool_size"] == pytest.approx(math.log(5))
    assert told(visited)["unvisited_mass"] == pytest.approx(0.25 + 0.125 + 0.125)


def test_disagreement_is_the_mean_change_of_the_last_rescoring(state):
    after = state.tree.rescored(np.array([1, 2]), np.array([HALF - 0.5, EIGHTH + 0.25]), 1, (True, True))
    rescoring = step(state.tree, after, Expansion.empty(), rescored=[1, 2])
    changed = attrs.evolve(state, steps=(*state.steps, rescoring), tree=after)
    assert told(changed)["disagreement"] == pytest.approx((0.5 + 0.25) / 2)


def test_before_the_first_step_and_with_nothing_left_to_visit():
    empty = told(bare_state())
    assert (empty["frontier_depth"], empty["expected_accepted"], empty["unvisited_mass"]) == (0.0, 0.0, 1.0)
    done = told(bare_state(tree=DraftTree.rooted(0).mark(np.array([0]), 1)))
    assert (done["selected_score"], done["selected_shallower"], done["unvisited_mass"]) == (LEAST_SCORE, 0.0, 0.0)


@given(draft_trees())
def test_all_are_finite_for_any_tree(tree):
    assert np.isfinite(list(told(bare_state(tree=tree)).values())).all()

"""Graft policies: rules G1 to G4, and what the overwriting one takes away."""

import attrs
import numpy as np
import pytest
from bare_parts import bare_source
from hypothesis import given
from hypothesis import strategies as st

from treegraft.testing.strategies import draft_trees, expansions
from treegraft.tree import DraftTree, Expansion, child_uid
from treegraft_plugins.graft_policies import NonDestructive, Overwrite

POLICIES = [NonDestructive(), Overwrite()]


@st.composite
def grafts(draw: st.DrawFn) -> tuple[DraftTree, Expansion, int]:
    tree = draw(draft_trees())
    return tree, draw(expansions(tree)), draw(st.integers(0, 1))


def proposed_uids(tree: DraftTree, expansion: Expansion) -> list[int]:
    """The uid of every proposal's path, followed anchor by anchor."""
    found: list[int] = []
    for anchor, token in zip(expansion.anchor.tolist(), expansion.token.tolist(), strict=True):
        above = tree.uid[anchor] if anchor >= 0 else found[~anchor]
        found.append(int(child_uid(np.array([above], np.uint64), np.array([token]))[0]))
    return found


def same_anchors(expansion: Expansion, old: DraftTree, new: DraftTree) -> Expansion:
    """The same proposals below the same paths, whose rows may have moved."""
    row = {uid: index for index, uid in enumerate(new.uid.tolist())}
    anchor = [row[int(old.uid[a])] if a >= 0 else a for a in expansion.anchor.tolist()]
    return attrs.evolve(expansion, anchor=anchor)


def nodes_by_path(tree: DraftTree) -> dict[int, tuple[float, ...]]:
    """Everything about every node but its row, which a policy that removes nodes may change."""
    names = ("edge_score", "path_score", "source", "scorer", "step", "visited", "draft_row")
    values = zip(*(getattr(tree, name).tolist() for name in names), strict=True)
    return dict(zip(tree.uid.tolist(), values, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@given(case=grafts())
def test_g1_valid_g2_every_proposal_present_g3_and_existing_paths_where_promised(policy, case):
    tree, expansion, index = case
    after = policy.graft(tree, expansion, bare_source(index))
    after.check()
    assert set(proposed_uids(tree, expansion)) <= set(after.uid.tolist())
    assert set(after.uid.tolist()) <= set(tree.uid.tolist()) | set(proposed_uids(tree, expansion))
    if policy.keeps_existing:
        assert set(tree.uid.tolist()) <= set(after.uid.tolist())


@pytest.mark.parametrize("policy", POLICIES)
@given(case=grafts())
def test_g4_grafting_twice_changes_nothing_more(policy, case):
    tree, expansion, index = case
    once = policy.graft(tree, expansion, bare_source(index))
    twice = policy.graft(once, same_anchors(expansion, tree, once), bare_source(index))
    assert nodes_by_path(twice) == nodes_by_path(once)


@given(case=grafts())
def test_overwrite_leaves_below_expanded_nodes_only_what_was_proposed_or_leads_to_an_expanded_node(case):
    tree, expansion, index = case
    after = Overwrite().graft(tree, expansion, bare_source(index))
    expanded = {int(tree.uid[a]) for a in expansion.anchor.tolist() if a >= 0}
    needed = {int(tree.uid[row]) for a in expansion.anchor.tolist() if a >= 0 for row in tree.path(a)}
    proposed = set(proposed_uids(tree, expansion))
    for row in range(1, len(after)):
        if int(after.uid[after.parent[row]]) in expanded:
            assert int(after.uid[row]) in proposed | needed
    untouched = [
        uid
        for row, uid in enumerate(tree.uid.tolist())
        if not expanded & {int(tree.uid[above]) for above in tree.path(row)[:-1]}
    ]
    assert set(untouched) <= set(after.uid.tolist())


@pytest.fixture(scope="module")
def small_tree() -> DraftTree:
    """Root 9; rows 1 (token 1) and 2 (token 2) below it; rows 3, 4 (tokens 3, 4) below row 1; by source 0."""
    tree = DraftTree.rooted(9).mark(np.array([0]), 0)
    tree = tree.append(Expansion.from_rows({0: [(1, -0.1), (2, -0.2)]}), 0, [True, False])
    tree = tree.mark(np.array([1]), 0)
    return tree.append(Expansion.from_rows({1: [(3, -0.3), (4, -0.4)]}), 0, [True, False])


def tokens_of_paths(tree: DraftTree) -> list[list[int]]:
    return sorted(tree.token[tree.path(row)].tolist() for row in range(len(tree)))


def test_non_destructive_merges_and_keeps_the_subtree(small_tree):
    marked = small_tree.mark(np.array([0]), 1)
    after = NonDestructive().graft(marked, Expansion.from_rows({0: [(1, -0.5), (5, -0.6)]}), bare_source(1))
    assert tokens_of_paths(after) == [[9], [9, 1], [9, 1, 3], [9, 1, 4], [9, 2], [9, 5]]
    assert after.source[1] == 0 and after.scorer[1] == 1 and after.edge_score[1] == -0.5


def test_overwrite_drops_existing_children_with_their_subtrees_and_begins_repeated_ones_anew(small_tree):
    marked = small_tree.mark(np.array([0]), 1)
    after = Overwrite().graft(marked, Expansion.from_rows({0: [(1, -0.5), (5, -0.6)]}), bare_source(1))
    assert tokens_of_paths(after) == [[9], [9, 1], [9, 5]]
    assert after.source[1:].tolist() == [1, 1] and after.visited[1:].tolist() == [0, 0]


def test_overwrite_keeps_an_expanded_node_that_lies_below_another(small_tree):
    marked = small_tree.mark(np.array([0, 1]), 1)
    after = Overwrite().graft(marked, Expansion.from_rows({0: [(5, -0.6)], 1: [(6, -0.1)]}), bare_source(1))
    assert tokens_of_paths(after) == [[9], [9, 1], [9, 1, 6], [9, 5]]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_proposals_change_nothing(policy, small_tree):
    assert nodes_by_path(policy.graft(small_tree, Expansion.empty(), bare_source(1))) == nodes_by_path(small_tree)

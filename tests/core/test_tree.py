"""DraftTree: every operation keeps the invariants, and does what it says."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from treegraft import tree as tree_module
from treegraft.errors import InvariantError
from treegraft.testing.strategies import draft_trees, expansions
from treegraft.tree import COLUMNS, DraftTree, Expansion, child_uid

FIRST, BOTH = [True, False], [True, True]


def path_tokens(tree: DraftTree, row: int) -> tuple[int, ...]:
    return tuple(tree.token[tree.path(row)].tolist())


def paths(tree: DraftTree) -> dict[tuple[int, ...], int]:
    return {path_tokens(tree, row): row for row in range(len(tree))}


def proposed_paths(tree: DraftTree, expansion: Expansion) -> list[tuple[int, ...]]:
    """The path of every proposal, followed anchor by anchor: the slow and obvious way."""
    found: list[tuple[int, ...]] = []
    for anchor, token in zip(expansion.anchor.tolist(), expansion.token.tolist(), strict=True):
        above = path_tokens(tree, anchor) if anchor >= 0 else found[~anchor]
        found.append((*above, token))
    return found


@st.composite
def grown(draw: st.DrawFn) -> tuple[DraftTree, Expansion, int, list[bool], DraftTree]:
    """A tree, what was appended to it by whom, and the result."""
    tree = draw(draft_trees())
    expansion, source = draw(expansions(tree)), draw(st.integers(0, 1))
    overrules = draw(st.lists(st.booleans(), min_size=2, max_size=2))
    return tree, expansion, source, overrules, tree.append(expansion, source, overrules)


@given(draft_trees())
def test_strategy_draws_valid_trees(tree):
    tree.check()


@given(grown())
def test_append_adds_exactly_the_proposed_paths(case):
    tree, expansion, source, _, after = case
    after.check()
    assert set(paths(after)) == set(paths(tree)) | set(proposed_paths(tree, expansion))
    assert len(paths(after)) == len(after)
    for name in ("token", "parent", "depth", "uid", "source", "step", "visited"):
        assert np.array_equal(getattr(after, name)[: len(tree)], getattr(tree, name)), name
    assert (after.source[len(tree) :] == source).all()
    assert (after.scorer[len(tree) :] == source).all()
    assert (after.step[len(tree) :] == max(tree.num_steps - 1, 0)).all()


@given(grown())
def test_append_lets_only_the_overruling_source_change_scores(case):
    tree, expansion, source, overrules, after = case
    first_score: dict[tuple[int, ...], float] = {}
    for path, log_prob in zip(proposed_paths(tree, expansion), expansion.log_prob.tolist(), strict=True):
        first_score.setdefault(path, log_prob)
    for path, row in paths(after).items():
        old = paths(tree).get(path)
        if path in first_score and (old is None or overrules[tree.scorer[old]]):
            assert (after.edge_score[row], after.scorer[row]) == (first_score[path], source)
        else:
            assert (after.edge_score[row], after.scorer[row]) == (tree.edge_score[old], tree.scorer[old])


@given(grown())
def test_append_twice_changes_nothing_more(case):
    tree, expansion, source, _, once = case
    overrules = [scorer == source for scorer in range(2)]
    once = tree.append(expansion, source, overrules)
    twice = once.append(expansion, source, overrules)
    assert len(twice) == len(once)
    assert np.array_equal(twice.edge_score, once.edge_score)


@given(grown())
def test_trees_and_expansions_are_values(case):
    """The old tree is as it was, and no array of the new one can be written."""
    tree, _, _, _, after = case
    tree.check()
    for field in attrs.fields(DraftTree):
        column = getattr(after, field.name)
        if isinstance(column, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                column[0] = column[0]


def test_merge_keeps_the_subtree():
    tree = DraftTree.rooted(5).append(Expansion([0, -1], [1, 2], [-1.0, -1.0]), 0, FIRST)
    after = tree.append(Expansion([0], [1], [-0.25]), 1, BOTH)
    assert after.token.tolist() == [5, 1, 2]
    assert after.edge_score.tolist() == [0.0, -0.25, -1.0]
    assert after.path_score.tolist() == [0.0, -0.25, -1.25]
    assert after.source.tolist() == [-1, 0, 0] and after.scorer.tolist() == [-1, 1, 0]


def test_proposals_below_a_merged_proposal_join_its_node():
    tree = DraftTree.rooted(5).append(Expansion([0, -1], [1, 2], [-1.0, -1.0]), 0, FIRST)
    after = tree.append(Expansion([0, -1, -1], [1, 2, 3], [-0.5, -0.5, -0.5]), 1, [False, False])
    assert after.token.tolist() == [5, 1, 2, 3] and after.parent.tolist() == [-1, 0, 1, 1]
    assert after.edge_score.tolist() == [0.0, -1.0, -1.0, -0.5]


def test_one_path_by_two_anchors_is_one_node():
    tree = DraftTree.rooted(5).append(Expansion([0], [1], [-1.0]), 0, FIRST)
    after = tree.append(Expansion([0, -1, 1, -3], [1, 2, 2, 4], [-1.0, -0.5, -0.75, -1.0]), 0, FIRST)
    assert after.token.tolist() == [5, 1, 2, 4] and after.parent.tolist() == [-1, 0, 1, 2]
    assert after.edge_score.tolist() == [0.0, -1.0, -0.5, -1.0], "the first of two equal proposals counts"


def test_chain_in_one_call():
    after = DraftTree.rooted(0).append(Expansion([0, -1, -2, -3], [1, 1, 1, 1], [-0.5] * 4), 0, FIRST)
    after.check()
    assert after.depth.tolist() == [0, 1, 2, 3, 4] and after.path_score[-1] == -2.0


@pytest.mark.parametrize("anchor", [[-1], [-2, 0], [-2, -1], [1], [-5]])
def test_append_refuses_anchors_that_point_nowhere_or_ahead(anchor):
    with pytest.raises(InvariantError):
        DraftTree.rooted(0).append(Expansion(anchor, [1] * len(anchor), [-1.0] * len(anchor)), 0, FIRST)


@given(draft_trees(), draft_trees())
def test_uid_is_the_path(left, right):
    """Equal paths have equal uids and different paths different ones, also across trees."""
    uids = [{path: int(tree.uid[row]) for path, row in paths(tree).items()} for tree in (left, right)]
    common = uids[0].keys() & uids[1].keys()
    assert all(uids[0][path] == uids[1][path] for path in common)
    everything = uids[0] | uids[1]
    assert len(set(everything.values())) == len(everything)


def test_uid_depends_on_the_order_of_tokens():
    start = np.zeros(1, np.uint64)
    forward = child_uid(child_uid(start, np.array([1])), np.array([2]))
    backward = child_uid(child_uid(start, np.array([2])), np.array([1]))
    assert forward != backward


@given(draft_trees(), st.data())
def test_keep_keeps_the_named_nodes_as_they_are(tree, data):
    mask = np.zeros(len(tree), np.bool_)
    for row in [0, *data.draw(st.lists(st.integers(0, len(tree) - 1)))]:
        mask[tree.path(row)] = True
    kept = tree.keep(mask)
    kept.check()
    old = np.flatnonzero(mask)
    assert set(paths(kept)) == {path_tokens(tree, row) for row in old}
    for name in COLUMNS:
        if name != "parent":
            assert np.array_equal(getattr(kept, name), getattr(tree, name)[old]), name


@given(draft_trees(), st.data())
def test_keep_refuses_what_is_not_a_tree(tree, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree))))
    orphans = [row for row in np.flatnonzero(mask)[1:] if not mask[tree.parent[row]]]
    assume(not mask[0] or orphans)
    with pytest.raises(InvariantError, match="ancestor-closed"):
        tree.keep(mask)
    with pytest.raises(InvariantError):
        tree.keep(np.ones(len(tree) + 1, np.bool_))


@given(draft_trees(), st.data())
def test_rescored_reaches_named_rows_and_the_paths_below(tree, data):
    rows = data.draw(st.lists(st.integers(0, len(tree) - 1), unique=True))
    overrules = data.draw(st.lists(st.booleans(), min_size=2, max_size=2))
    new = np.linspace(-3.0, 0.0, len(rows))
    after = tree.rescored(np.array(rows, np.int64), new, 1, overrules)
    after.check()
    for row in range(len(tree)):
        if row in rows and row > 0 and overrules[tree.scorer[row]]:
            assert (after.edge_score[row], after.scorer[row]) == (new[rows.index(row)], 1)
        else:
            assert (after.edge_score[row], after.scorer[row]) == (tree.edge_score[row], tree.scorer[row])
    assert np.array_equal(after.uid, tree.uid)


@given(draft_trees(), st.data())
def test_mark_sets_one_bit_and_begins_a_step(tree, data):
    rows = data.draw(st.lists(st.integers(0, len(tree) - 1), unique=True))
    source = data.draw(st.integers(0, 62))
    after = tree.mark(np.array(rows, np.int64), source)
    after.check()
    assert after.num_steps == tree.num_steps + 1
    expected = [tree.visited_by(source)[row] or row in rows for row in range(len(tree))]
    assert after.visited_by(source).tolist() == expected
    others = [s for s in range(63) if s != source]
    assert all(np.array_equal(after.visited_by(s), tree.visited_by(s)) for s in others)


def test_newest_nodes_are_those_of_the_last_step():
    tree = DraftTree.rooted(0).mark([0], 0).append(Expansion([0], [1], [-1.0]), 0, FIRST)
    tree = tree.mark([1], 1).append(Expansion([1], [2], [-1.0]), 1, BOTH)
    assert tree.step.tolist() == [-1, 0, 1] and tree.num_steps == 2


@given(draft_trees())
def test_every_prefix_of_the_ranking_is_a_tree(tree):
    order = tree.ranked()
    assert sorted(order.tolist()) == list(range(len(tree))) and order[0] == 0
    for size in range(1, len(tree) + 1):
        chosen = set(order[:size].tolist())
        assert all(int(tree.parent[row]) in chosen for row in chosen if row)
    assert (np.diff(tree.path_score[order]) <= 0).all()


@given(draft_trees())
def test_path_scores_fall_from_parent_to_child(tree):
    assert (tree.path_score[1:] <= tree.path_score[tree.parent[1:]]).all()


@given(draft_trees())
def test_reading(tree):
    for row in range(len(tree)):
        children = [r for r in range(len(tree)) if tree.parent[r] == row]
        assert tree.leaves()[row] == (not children)
        assert tree.path(row)[0] == 0 and tree.path(row)[-1] == row and len(tree.path(row)) == tree.depth[row] + 1
        assert {tree.child(row, int(tree.token[r])) for r in children} == set(children)
    assert tree.child(0, 99) is None


def test_draft_probs_follow_their_nodes():
    probs = np.array([[0.25, 0.75], [0.5, 0.5]])
    tree = DraftTree.rooted(0).append(Expansion([0], [0], [-1.0]), 0, FIRST)
    tree = tree.append(Expansion([0, 1], [1, 1], [-1.0, -1.0], draft_probs=probs), 0, FIRST)
    tree = tree.append(Expansion([0, 2], [0, 0], [-1.0, -1.0], draft_probs=1 - probs), 0, FIRST)
    assert tree.draft_row.tolist() == [-1, -1, 0, 1, 2], "a merged proposal leaves its row out"
    assert tree.draft_probs[tree.draft_row[2:]].tolist() == [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]
    kept = tree.keep(np.array([True, False, True, False, True]))
    assert kept.draft_probs[kept.draft_row[1:]].tolist() == [[0.25, 0.75], [0.5, 0.5]]


def changed(tree, **columns):
    """`tree` with other values in some columns."""
    return attrs.evolve(tree, **{name: np.array(values, getattr(tree, name).dtype) for name, values in columns.items()})


BROKEN = {
    "only one": {"parent": [-1, 0, -1]},
    "parents before children": {"parent": [-1, 2, 0]},
    "only one|parents before": {"parent": [-1, 0, 7]},
    "depth": {"depth": [0, 1, 1]},
    "siblings": {"token": [0, 1, 1], "parent": [-1, 0, 0], "depth": [0, 1, 1]},
    "edge_score <= 0": {"edge_score": [0.0, 0.5, -1.0]},
    "path_score": {"path_score": [0.0, -1.0, -1.0]},
    "uid": {"uid": [1, 2, 3]},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_check_names_the_broken_rule(rule):
    tree = DraftTree.rooted(0).append(Expansion([0, -1], [1, 2], [-1.0, -1.0]), 0, FIRST)
    tree.check()
    with pytest.raises(InvariantError, match=rule):
        changed(tree, **BROKEN[rule]).check()


def test_check_sees_not_a_number_and_writable_columns():
    tree = DraftTree.rooted(0).append(Expansion([0], [1], [-1.0]), 0, FIRST)
    with pytest.raises(InvariantError, match="edge_score <= 0"):
        changed(tree, edge_score=[0.0, np.nan]).check()
    tree.token.flags.writeable = True
    with pytest.raises(InvariantError, match="read-only"):
        tree.check()


def test_debug_switch_checks_on_construction(monkeypatch):
    tree = DraftTree.rooted(0)
    changed(tree, depth=[7])
    monkeypatch.setattr(tree_module, "DEBUG", True)
    with pytest.raises(InvariantError, match="depth"):
        changed(tree, depth=[7])


def test_the_callers_arrays_stay_the_callers():
    """Neither can the caller change a value by its own array, nor does the value lock that array."""
    own = np.array([1, 2], dtype=np.int64)
    for given_array in (own, own[:], torch.tensor([1, 2])):
        expansion = Expansion([0, 0], given_array, [-1.0, -1.0])
        given_array[0] = 7
        assert expansion.token.tolist() == [1, 2]
        given_array[0] = 1


def test_from_rows_and_empty():
    expansion = Expansion.from_rows({0: [(7, -0.1), (9, -2.0)], 3: [(7, -0.5)], 4: []}, signals={"confidence": 0.5})
    assert (expansion.anchor.tolist(), expansion.token.tolist()) == ([0, 0, 3], [7, 9, 7])
    assert expansion.log_prob.tolist() == [-0.1, -2.0, -0.5] and expansion.signals == {"confidence": 0.5}
    assert len(Expansion.empty()) == len(Expansion.from_rows({})) == 0
    tree = DraftTree.rooted(0)
    assert tree.append(Expansion.empty(), 0, FIRST) is tree

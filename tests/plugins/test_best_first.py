"""The best-first tree is exactly the best prefixes of what the drafter said, for every budget."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegraft.errors import InvariantError
from treegraft.interfaces import EdgeScorer
from treegraft.tree import DraftTree
from treegraft_plugins.blocktree import best_first, scored_edges

# Distinct primes' roots: no two different sums of them are equal, so that the best prefixes are unique.
UNEQUAL = [
    -np.sqrt(p) for p in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83)
]


@st.composite
def marginals(draw, levels=(-0.0, -0.5, -1.0, -np.inf)):
    """log_prob [L, K], rows descending; ties and impossible tokens among them."""
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    values = st.sampled_from([*UNEQUAL, *levels])
    rows = [sorted(draw(st.lists(values, min_size=width, max_size=width)), reverse=True) for _ in range(depth)]
    return np.array(rows)


@st.composite
def edges(draw):
    """edge_scores [L, P, K] in any order, P = K."""
    depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    values = st.sampled_from([*UNEQUAL, -0.5])
    count = depth * width * width
    return np.array(draw(st.lists(values, min_size=count, max_size=count))).reshape(depth, width, width)


def all_prefixes(scores):
    """(score, columns) of every possible prefix; `scores` [L, P, K]."""
    depth, _, width = scores.shape
    found = {}
    for length in range(1, depth + 1):
        for columns in itertools.product(range(width), repeat=length):
            above = (0, *columns)
            score = sum(scores[d, above[d], columns[d]] for d in range(length))
            if score > -np.inf:
                found[columns] = score
    return found


def prefixes(tree):
    """The columns from the root to every node, in order."""
    paths = []
    for parent, rank in zip(tree.parent.tolist(), tree.rank.tolist(), strict=True):
        paths.append(((*paths[parent], rank)) if parent >= 0 else (rank,))
    return paths


def check(tree, scores, budget):
    """`tree` is the `budget` best of all prefixes, best first."""
    expected, paths = all_prefixes(scores), prefixes(tree)
    assert len(set(paths)) == len(paths) == min(budget, len(expected))
    assert tree.depth.tolist() == [len(path) for path in paths]
    np.testing.assert_allclose(tree.score, [expected[path] for path in paths], atol=1e-12)
    best = sorted(expected.values(), reverse=True)[: len(paths)]
    np.testing.assert_allclose(tree.score, best, atol=1e-12)
    assert (np.diff(tree.score) <= 1e-12).all()
    assert (tree.parent < np.arange(len(tree))).all()


@given(marginals(), st.integers(0, 130))
def test_the_best_prefixes_of_independent_places(log_prob, budget):
    width = log_prob.shape[1]
    check(best_first(log_prob, budget), np.repeat(log_prob[:, None], width, axis=1), budget)


@given(edges(), st.integers(0, 60))
def test_the_best_prefixes_where_a_tokens_score_depends_on_its_parent(scores, budget):
    log_prob = np.zeros((scores.shape[0], scores.shape[2]))
    check(best_first(log_prob, budget, edge_scores=scores), scores, budget)


@given(marginals() | edges(), st.integers(0, 40), st.integers(0, 40))
def test_smaller_trees_are_the_beginning_of_larger_ones(scores, budget, more):
    given_edges = scores if scores.ndim == 3 else None
    log_prob = scores if given_edges is None else np.zeros((scores.shape[0], scores.shape[2]))
    small, large = (best_first(log_prob, b, edge_scores=given_edges) for b in (budget, budget + more))
    for name in ("parent", "depth", "rank", "score", "edge_score"):
        assert np.array_equal(getattr(small, name), getattr(large, name)[: len(small)])


@given(marginals() | edges(), st.integers(1, 60), st.integers(1, 3))
def test_branching_limits_the_children_of_every_node_to_its_best(scores, budget, branching):
    given_edges = scores if scores.ndim == 3 else None
    log_prob = scores if given_edges is None else np.zeros((scores.shape[0], scores.shape[2]))
    width = log_prob.shape[1]
    tree = best_first(log_prob, budget, edge_scores=given_edges, branching=branching)
    full = np.repeat(log_prob[:, None], width, axis=1) if given_edges is None else given_edges.copy()
    order = np.argsort(-full, axis=-1, kind="stable")
    np.put_along_axis(full, order[..., branching:], -np.inf, axis=-1)
    check(tree, full, budget)


@given(marginals(), st.integers(1, 60))
def test_an_expansion_of_it_is_a_valid_tree_with_the_same_scores(log_prob, budget):
    tokens = np.arange(log_prob.size).reshape(log_prob.shape)
    tree = best_first(log_prob, budget)
    grown = DraftTree.rooted(99).append(tree.expansion(tokens), 0, (True,))
    grown.check()
    assert len(grown) == len(tree) + 1
    scores = {tuple(grown.token[grown.path(row)[1:]]): grown.path_score[row] for row in range(1, len(grown))}
    for path, score in zip(prefixes(tree), tree.score, strict=True):
        assert scores[tuple(tokens[d, c] for d, c in enumerate(path))] == pytest.approx(score, abs=1e-12)


class Bigram(EdgeScorer):
    """log_prob less a tenth of the distance between the tokens."""

    def score(self, parents, children, log_prob):
        return log_prob[:, None, :] - 0.1 * abs(parents[:, :, None] - children[:, None, :])


def test_edge_scores_put_the_root_above_the_first_depth_and_each_depth_above_the_next():
    tokens, log_prob = np.array([[4, 7], [1, 2]]), np.log([[0.6, 0.4], [0.5, 0.5]])
    scores = scored_edges(Bigram(), 5, tokens, log_prob)
    np.testing.assert_allclose(scores[0, 0], log_prob[0] - [0.1, 0.2])
    np.testing.assert_allclose(scores[1], log_prob[1] - 0.1 * np.array([[3, 2], [6, 5]]))


def test_what_the_drafter_rules_out_stays_ruled_out_and_scorers_see_finite_numbers():
    seen = []

    class Watching(Bigram):
        def score(self, parents, children, log_prob):
            seen.append(log_prob)
            return super().score(parents, children, log_prob)

    with np.errstate(divide="ignore"):
        log_prob = np.log([[0.6, 0.4], [1.0, 0.0]])
    scores = scored_edges(Watching(), 5, np.array([[4, 7], [1, 2]]), log_prob)
    assert np.isfinite(seen[0]).all()
    assert np.isneginf(scores).tolist() == [[[False, False]] * 2, [[False, True]] * 2]
    assert len(best_first(log_prob, 9, scores)) == 4


@pytest.mark.parametrize("wrong", [0.5, np.nan, -np.inf])
def test_edge_scores_that_break_the_rule_are_refused(wrong):
    class Broken(EdgeScorer):
        def score(self, parents, children, log_prob):
            return np.full((*children.shape, children.shape[1]), wrong)

    with pytest.raises(InvariantError, match="E1"):
        scored_edges(Broken(), 5, np.array([[4, 7]]), np.log([[0.6, 0.4]]))


def test_edge_scores_of_another_shape_are_refused():
    class Flat(EdgeScorer):
        def score(self, parents, children, log_prob):
            return log_prob

    with pytest.raises(InvariantError, match="E1"):
        scored_edges(Flat(), 5, np.array([[4, 7]]), np.log([[0.6, 0.4]]))


def test_no_places_no_nodes():
    assert len(best_first(np.zeros((0, 4)), 10)) == 0
    assert len(best_first(np.full((2, 3), -np.inf), 10)) == 0

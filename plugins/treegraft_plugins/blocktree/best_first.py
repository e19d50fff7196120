"""The best prefixes of a factorised distribution, as a tree."""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush, heappushpop
from math import inf

import attrs
import numpy as np

from treegraft.errors import InvariantError
from treegraft.interfaces import EdgeScorer
from treegraft.tree import Expansion, Floats, Ints


@attrs.frozen(eq=False)
class PrefixTree:
    """Nodes in the order they were taken, best first, so that parents stand before their children.

    A tree of a smaller budget is the beginning of a larger one's.

    Attributes:
        parent: int64 [B], a node's parent among the nodes; -1 for the root, which is none of them.
        depth: int64 [B], from 1.
        rank: int64 [B], the column of the node's token among its depth's candidates.
        score: float64 [B] (nats), the sum of the edges from the root.
        edge_score: float64 [B] (nats).
    """

    parent: Ints
    depth: Ints
    rank: Ints
    score: Floats
    edge_score: Floats

    def __len__(self) -> int:
        return len(self.parent)

    def expansion(self, tokens: Ints, root: int = 0, signals: Mapping[str, float] | None = None) -> Expansion:
        """The tree below row `root`, with `tokens` [L, K] the candidates of each depth."""
        anchor = np.where(self.parent < 0, root, ~self.parent)
        return Expansion(anchor, tokens[self.depth - 1, self.rank], self.edge_score, signals=signals or {})


def best_first(
    log_prob: Floats, budget: int, edge_scores: Floats | None = None, branching: int | None = None
) -> PrefixTree:
    """The `budget` most probable non-empty prefixes of L tokens, or all where there are fewer.

    A heap holds, for every node taken, its first child and its next sibling. As no score exceeds its parent's, the best
    of them is the best prefix not taken yet: O(B log B), whatever L and K.

    Args:
        log_prob: float64 [L, K] (nats), the candidates of depths 1..L, each row descending; -inf is never taken.
        budget: B, most nodes.
        edge_scores: float64 [L, P, K] (nats, <= 0) in their place: [d, p, c] scores candidate c of depth d + 1 under
            candidate p of depth d, in any order; at depth 1 row 0 stands for the root.
        branching: most children of one node; None for no limit.

    Source: DDTree; with `edge_scores`, GRAFT (TDES).
    """
    if not log_prob.size:
        return PrefixTree(*np.zeros((3, 0), np.int64), *np.zeros((2, 0)))
    if edge_scores is None:
        below = _ChildrenByDepth(log_prob, branching).below
    else:
        below = _ChildrenByParent(edge_scores, branching).below
    last_depth = len(log_prob)
    taken: list[tuple[int, int, int, float, float]] = []
    row = below(0, 0)
    heap: list[_Entry] = []
    best: _Entry = (row[0][0], -1, -1, 0.0, 1, 0, row)
    while len(taken) < budget and best[0] < inf:
        cost, _, parent, parent_cost, depth, rank, row = best
        costs, columns = row
        node, column = len(taken), columns[rank]
        taken.append((parent, depth, column, cost, costs[rank]))
        rank += 1
        if rank < len(costs):
            heappush(heap, (parent_cost + costs[rank], 2 * node, parent, parent_cost, depth, rank, row))
        if depth < last_depth:
            row = below(depth, column)
            best = heappushpop(heap, (cost + row[0][0], 2 * node + 1, node, cost, depth + 1, 0, row))
        elif heap:
            best = heappop(heap)
        else:
            break
    parents, depths, ranks, all_costs, edge_costs = zip(*taken, strict=True) if taken else ((),) * 5
    whole = (np.array(column, dtype=np.int64) for column in (parents, depths, ranks))
    return PrefixTree(*whole, *(-np.array(column, dtype=np.float64) for column in (all_costs, edge_costs)))


_Row = tuple[list[float], Sequence[int]]
"""The children a node may have: their costs (minus their scores), ascending, and their columns."""

_Entry = tuple[float, int, int, float, int, int, _Row]
"""A node in the heap: its path's cost, what tells equal ones apart, parent, that one's cost, depth, rank, siblings."""


class _ChildrenByDepth:
    """The same children below every node of a depth."""

    def __init__(self, log_prob: Floats, branching: int | None):
        columns = range(log_prob.shape[1])
        self._rows: list[_Row] = [(costs, columns) for costs in (-log_prob[:, :branching]).tolist()]

    def below(self, depth: int, column: int) -> _Row:
        return self._rows[depth]


class _ChildrenByParent:
    """Children sorted for each parent, when it comes to it: most parents never do."""

    def __init__(self, edge_scores: Floats, branching: int | None):
        self._costs, self._branching = -edge_scores, branching
        self._rows: dict[tuple[int, int], _Row] = {}

    def below(self, depth: int, column: int) -> _Row:
        row = self._rows.get((depth, column))
        if row is None:
            costs = self._costs[depth, column]
            order = costs.argsort(kind="stable")[: self._branching]
            row = self._rows[depth, column] = costs[order].tolist(), order.tolist()
        return row


_LEAST_LOG_PROB = -1e4  # (nats) stands for impossible where scorers are asked, so that scores stay finite


def scored_edges(scorer: EdgeScorer, root_token: int, tokens: Ints, log_prob: Floats) -> Floats:
    """Edge scores float64 [L, K, K] of `tokens` [L, K] below each other, `root_token` above the first depth.

    What the drafter rules out (-inf) stays ruled out under every parent.

    Raises:
        InvariantError: the scorer broke rule E1.
    """
    parents = np.concatenate([np.full_like(tokens[:1], root_token), tokens[:-1]])
    impossible = np.isneginf(log_prob)
    edges = scorer.score(parents, tokens, np.where(impossible, _LEAST_LOG_PROB, log_prob))
    wanted = (*tokens.shape, tokens.shape[1])
    if edges.shape != wanted or not np.isfinite(edges).all() or (edges > 0).any():
        raise InvariantError(
            type(scorer).__name__, "edge scores that break a rule", f"Rule: E1 finite, <= 0, of shape {list(wanted)}."
        )
    return np.where(impossible[:, None], -np.inf, edges) if impossible.any() else edges

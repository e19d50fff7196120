"""The draft tree and the proposals that extend it: immutable values with checked invariants.

A `DraftTree` is a table of nodes held as parallel numpy arrays. Nothing changes a tree in place: `append`, `keep`,
`rescored` and `mark` return new ones, so no plugin can reach back into the tree of another. Because edge scores are
log probabilities (never above zero), the best n nodes by path score always form a tree, and smaller selections are
prefixes of larger ones; pruning, budgets and nested trees all rest on that.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from treegraft.errors import InvariantError

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DEBUG = bool(os.environ.get("TREEGRAFT_DEBUG"))
"""Check every tree on construction: set the environment variable TREEGRAFT_DEBUG, or this, as tests do."""

_MASK = 2**64 - 1
_HASH: tuple[Any, ...] = (1, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 32)  # odd multipliers: every step can be undone
_ARRAY_HASH = tuple(np.array(number, np.uint64) for number in _HASH)  # converting a number takes longer than using it


def child_uid(parent_uid: Any, token: Any) -> Any:
    """Hash of (parent's uid, token): equal paths have equal uids, and siblings never share one.

    Args:
        parent_uid: uint64 array or int.
        token: an array of the same shape, or an int.
    """
    is_array = isinstance(token, np.ndarray)
    one, spread, mix, half = _ARRAY_HASH if is_array else _HASH
    x = (parent_uid + ((token.astype(np.uint64) if is_array else token) + one) * spread) * mix
    if not is_array:  # arrays wrap by themselves
        x &= _MASK
    return x ^ (x >> half)


def _column(value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """`value` as a read-only array of `dtype`; an array that is the caller's own is copied first."""
    array = np.asarray(value, dtype=dtype)
    if array.flags.writeable:
        if array is value or array.base is not None:  # a tensor lends its memory
            array = array.copy()
        array.setflags(write=False)
    return array


def _int64(value: ArrayLike) -> Ints:
    return _column(value, np.int64)


def _float64(value: ArrayLike) -> Floats:
    return _column(value, np.float64)


def _signals(value: Mapping[str, float]) -> Mapping[str, float]:
    return value if isinstance(value, MappingProxyType) else MappingProxyType(dict(value))


@attrs.frozen(eq=False)
class Expansion:
    """What one call of a drafter proposes: E nodes to attach below a tree's nodes or below each other.

    Attributes:
        anchor: int64 [E]. `a >= 0` attaches to tree row a; `a < 0` to the earlier proposal `~a` of this expansion, so
            that chains and whole subtrees fit in one call.
        token: int64 [E], ids in the target's vocabulary.
        log_prob: float64 [E] (nats), the drafter's log probability of the token given its path; finite and <= 0.
        draft_probs: [E, V] or None, for sampled proposals the distribution each token was drawn from; core fills it in
            with what `DraftRequest.sample` drew from.
        signals: what the drafter can say about this call (match confidence, block entropy, ...), by name.
        chained: derived, {proposal: the earlier one it hangs below}, for links of chains and parts of subtrees.
    """

    anchor: Ints = attrs.field(converter=_int64)
    token: Ints = attrs.field(converter=_int64)
    log_prob: Floats = attrs.field(converter=_float64)
    draft_probs: Any = None
    signals: Mapping[str, float] = attrs.field(factory=dict, converter=_signals)
    chained: Mapping[int, int] = attrs.field(init=False, repr=False)

    @chained.default
    def _find_chained(self) -> Mapping[int, int]:
        anchors = self.anchor.tolist()
        if not anchors or min(anchors) >= 0:
            return {}
        return {proposal: ~anchor for proposal, anchor in enumerate(anchors) if anchor < 0}

    @classmethod
    def empty(cls, signals: Mapping[str, float] | None = None) -> "Expansion":
        """No proposals."""
        return cls(anchor=[], token=[], log_prob=[], signals=signals or {})

    @classmethod
    def from_rows(
        cls, rows: Mapping[int, Sequence[tuple[int, float]]], signals: Mapping[str, float] | None = None
    ) -> "Expansion":
        """Children for tree rows: `{row: [(token, log_prob), ...], ...}`.

        >>> Expansion.from_rows({0: [(7, -0.1), (9, -2.0)]}).token.tolist()
        [7, 9]
        """
        flat = [(row, token, log_prob) for row, children in rows.items() for token, log_prob in children]
        anchor, token, log_prob = zip(*flat, strict=True) if flat else ((), (), ())
        return cls(anchor=anchor, token=token, log_prob=log_prob, signals=signals or {})

    def scored(self, log_prob: Floats, draft_probs: Floats | None = None) -> "Expansion":
        """The same proposals with other log probabilities [E], and what they were drawn from [E, V]."""
        # Several times faster than attrs.evolve, and called at every step.
        return Expansion(self.anchor, self.token, log_prob, draft_probs, self.signals)

    def depths(self, tree: "DraftTree") -> Ints:
        """int [E]: how deep below the root of `tree` each proposal lies."""
        chained = self.chained
        depth = tree.depth[np.maximum(self.anchor, 0) if chained else self.anchor] + 1
        for proposal, above in chained.items():
            depth[proposal] = depth[above] + 1
        return depth

    def __len__(self) -> int:
        return len(self.token)


COLUMNS = (
    "token", "parent", "depth", "edge_score", "path_score", "source", "scorer", "step", "visited", "uid", "draft_row",
)  # fmt: skip
"""What a tree holds about each of its nodes."""


@attrs.frozen(eq=False)
class DraftTree:
    """A tree of drafted tokens below the last committed one (N nodes, the root included).

    Row 0 is the root: the last committed token, not yet in the target's cache. Parents come before children. All
    arrays are read-only.

    Attributes:
        token: int64 [N].
        parent: int64 [N], always an earlier row; the root's is -1.
        depth: int64 [N], the root's is 0.
        edge_score: float64 [N], log probability of the token given its path, by its scorer's lights (nats, <= 0).
        path_score: float64 [N], sum of edge scores from the root, whose own is 0: the only ranking key.
        source: int64 [N], index of the source that proposed the node first; the root's is -1.
        scorer: int64 [N], index of the source that scored it last; the root's is -1.
        step: int64 [N], the step that created it, never falling from row to row; the root's is -1.
        visited: int64 [N], bit s is set when source s has expanded the node.
        uid: uint64 [N], a hash of the path: the key for whatever a drafter caches about a node.
        draft_row: int64 [N], row of `draft_probs` that the token was sampled from; -1 for deterministic proposals.
        draft_probs: [Q, V] or None, distributions that sampled proposals were drawn from.
        num_steps: drafting steps begun so far (each `mark` begins one).
    """

    token: Ints
    parent: Ints
    depth: Ints
    edge_score: Floats
    path_score: Floats
    source: Ints
    scorer: Ints
    step: Ints
    visited: Ints
    uid: NDArray[np.uint64]
    draft_row: Ints
    draft_probs: Any = None
    num_steps: int = 0

    def __attrs_post_init__(self) -> None:
        for name in COLUMNS:
            getattr(self, name).setflags(write=False)
        if DEBUG:
            self.check()

    @classmethod
    def rooted(cls, token: int) -> "DraftTree":
        """The tree of a fresh round: the last committed token alone."""
        uid = np.array([child_uid(0, token)], np.uint64)
        return cls(np.array([token]), _NONE, _ZERO, _NO_SCORE, _NO_SCORE, _NONE, _NONE, _NONE, _ZERO, uid, _NONE)

    def __len__(self) -> int:
        return len(self.token)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NDArray[np.void]:
        """The columns as records [N], a copy: to compare or to print whole trees."""
        nodes = np.empty(len(self), [(name, getattr(self, name).dtype) for name in COLUMNS])
        for name in COLUMNS:
            nodes[name] = getattr(self, name)
        return nodes

    def child(self, row: int, token: int) -> int | None:
        """The child of `row` that carries `token`, or None."""
        (rows,) = np.nonzero((self.parent == row) & (self.token == token))
        return int(rows[0]) if len(rows) else None

    def path(self, row: int) -> list[int]:
        """Rows from the root (included) down to `row` (included)."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = int(self.parent[row])
        return rows[::-1]

    def visited_by(self, source: int) -> Bools:
        """bool [N]: the nodes that source has expanded."""
        seen: Bools = self.visited & (1 << source) != 0
        return seen

    def leaves(self) -> Bools:
        """bool [N]: the nodes without children."""
        leaf = np.ones(len(self), dtype=np.bool_)
        leaf[self.parent[1:]] = False
        return leaf

    def ranked(self) -> Ints:
        """int64 [N]: all rows by (path score descending, depth ascending, row ascending).

        Every prefix is ancestor-closed, so the best n non-root nodes are `ranked()[1 : n + 1]`.
        """
        return np.lexsort((self.depth, -self.path_score))

    # -- making new trees ---------------------------------------------------------------------------------------------

    def append(self, expansion: Expansion, source: int, overrules: Sequence[bool] | Bools) -> "DraftTree":
        """Attach proposals; one that repeats an existing path merges with that node and keeps its subtree.

        Args:
            expansion: E proposals.
            source: index of the proposing source.
            overrules: [sources], True where this source's score replaces that scorer's on a merge.

        Raises:
            InvariantError: an anchor names no row of the tree and no earlier proposal.
        """
        if not len(expansion):
            return self
        size, token, edge = len(self), expansion.token, expansion.log_prob
        parent, depth, uid, path = self._attach(expansion)
        new: Any = slice(None)  # the proposals that become nodes: all, if their paths are new and distinct
        better = ()
        known, paths = self.uid.tolist(), uid.tolist()
        distinct = set(paths)
        are_new = len(distinct) == len(paths) and distinct.isdisjoint(known)
        if not are_new:
            # The first row, or N + the first proposal, of the same path as each proposal.
            first = {path: row for row, path in enumerate(known) if path in distinct}
            original = np.array([first.setdefault(path, row) for row, path in enumerate(paths, size)])
            is_new = original == np.arange(size, size + len(paths))
            if expansion.chained:
                every = np.concatenate([np.arange(size), original])
                parent = ((every == np.arange(len(every))).cumsum() - 1)[every[parent]]
            new, merged = is_new.nonzero()[0], (original < size).nonzero()[0]
            token, edge, parent, depth, uid = token[new], edge[new], parent[new], depth[new], uid[new]
            better = merged[np.asarray(overrules, dtype=np.bool_)[self.scorer[original[merged]]]]
        edge_score, scorer = np.concatenate([self.edge_score, edge]), _extended(self.scorer, source, len(token))
        num_scored = size  # rows whose path scores stand
        if len(better):
            # Backwards, so that the first of several equal proposals is the one that counts.
            rows = original[better[::-1]]
            edge_score[rows], scorer[rows] = expansion.log_prob[better[::-1]], source
            changed = (edge_score[:size] != self.edge_score).nonzero()[0]
            num_scored = int(changed[0]) if len(changed) else size
        parent = np.concatenate([self.parent, parent])
        if are_new:
            path_score = np.concatenate([self.path_score, path])
        else:
            path_score = _path_scores(self.path_score[:num_scored], parent, edge_score)
        draft_row, draft_probs = self._draft_rows(expansion, new, len(token))
        return DraftTree(
            token=np.concatenate([self.token, token]),
            parent=parent,
            depth=np.concatenate([self.depth, depth]),
            edge_score=edge_score,
            path_score=path_score,
            source=_extended(self.source, source, len(token)),
            scorer=scorer,
            step=_extended(self.step, max(self.num_steps - 1, 0), len(token)),
            visited=_extended(self.visited, 0, len(token)),
            uid=np.concatenate([self.uid, uid]),
            draft_row=_extended(self.draft_row, draft_row, len(token)),
            draft_probs=draft_probs,
            num_steps=self.num_steps,
        )

    def keep(self, mask: Bools) -> "DraftTree":
        """The nodes where `mask` [N] is True, which must be ancestor-closed and hold the root.

        Raises:
            InvariantError: the mask drops the root, or keeps a node whose parent it drops.
        """
        mask = np.asarray(mask, dtype=np.bool_)
        rows = mask.nonzero()[0]
        if mask.shape != (len(self),) or not mask[0] or not mask[self.parent[rows[1:]]].all():
            raise InvariantError(
                "DraftTree.keep", f"a mask of shape {mask.shape} that is not ancestor-closed",
                f"Allowed: bool [{len(self)}] that holds the root and the parent of every node it holds.",
            )  # fmt: skip
        kept = {name: getattr(self, name)[rows] for name in COLUMNS}
        kept["parent"][1:] = (mask.cumsum() - 1)[kept["parent"][1:]]
        return DraftTree(**kept, draft_probs=self.draft_probs, num_steps=self.num_steps)

    def rescored(self, rows: Ints, log_prob: Floats, source: int, overrules: Sequence[bool] | Bools) -> "DraftTree":
        """Give `rows` [R] new edge scores `log_prob` [R]; path scores are recomputed from the root down.

        The root is left alone, and so are nodes last scored by a source that `overrules` does not name.
        """
        rows = np.asarray(rows, dtype=np.int64)
        allowed = (rows > 0) & np.asarray(overrules, dtype=np.bool_)[self.scorer[rows]]
        rows = rows[allowed]
        if not len(rows):
            return self
        edge_score, scorer = self.edge_score.copy(), self.scorer.copy()
        edge_score[rows], scorer[rows] = log_prob[allowed], source
        path_score = _path_scores(self.path_score[: rows.min()], self.parent, edge_score)
        return self._with(edge_score, path_score, scorer, self.visited, self.num_steps)

    def mark(self, rows: Ints, source: int) -> "DraftTree":
        """Begin a drafting step: record that `source` expands `rows` [P]."""
        visited = self.visited.copy()
        visited[rows] |= 1 << source
        return self._with(self.edge_score, self.path_score, self.scorer, visited, self.num_steps + 1)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _with(self, edge_score: Floats, path_score: Floats, scorer: Ints, visited: Ints, num_steps: int) -> "DraftTree":
        """The same nodes with these scores and visitors."""
        # Several times faster than attrs.evolve, and called at every step.
        return DraftTree(
            self.token, self.parent, self.depth, edge_score, path_score, self.source, scorer, self.step, visited,
            self.uid, self.draft_row, self.draft_probs, num_steps,
        )  # fmt: skip

    def _attach(self, expansion: Expansion) -> tuple[Ints, Ints, NDArray[np.uint64], Floats]:
        """parent, depth, uid and path score [E] of the proposals; proposal i as a parent is row N + i."""
        anchor, chained = expansion.anchor, expansion.chained
        if anchor.max() >= len(self) or any(above >= proposal for proposal, above in chained.items()):
            raise InvariantError(
                "Expansion.anchor", f"{anchor.tolist()} for a tree of {len(self)} nodes",
                "Allowed: a row of the tree, or ~i for the earlier proposal i.",
            )  # fmt: skip
        parent, row = anchor, anchor
        if chained:
            parent, row = np.where(anchor < 0, len(self) + ~anchor, anchor), np.maximum(anchor, 0)
        depth, uid = self.depth[row] + 1, child_uid(self.uid[row], expansion.token)
        path = self.path_score[row] + expansion.log_prob
        for proposal, above in chained.items():
            depth[proposal] = depth[above] + 1
            uid[proposal] = child_uid(int(uid[above]), int(expansion.token[proposal]))
            path[proposal] = path[above] + expansion.log_prob[proposal]
        return parent, depth, uid, path

    def _draft_rows(self, expansion: Expansion, new: Any, num_new: int) -> tuple[Any, Any]:
        """Which distribution each of the `new` proposals was drawn from, and all distributions."""
        if expansion.draft_probs is None:
            return -1, self.draft_probs
        probs = np.asarray(expansion.draft_probs)[new]
        if self.draft_probs is not None:
            probs = np.concatenate([self.draft_probs, probs])
        probs.setflags(write=False)
        return np.arange(len(probs) - num_new, len(probs)), probs

    def check(self) -> None:
        """Verify every invariant in the class's docstring.

        Raises:
            InvariantError: naming the first that does not hold.
        """
        kids, up = np.arange(1, len(self)), self.parent[1:]
        # In this order: a rule may rely on those before it.
        rules: dict[str, Callable[[], bool]] = {
            "read-only": lambda: not any(getattr(self, name).flags.writeable for name in COLUMNS),
            "the root first, and only one": lambda: len(self) > 0 and self.parent[0] == -1 and bool((up >= 0).all()),
            "parents before children": lambda: bool((up < kids).all()),
            "depth = parent's depth + 1": lambda: (
                self.depth[0] == 0 and np.array_equal(self.depth[1:], self.depth[up] + 1)
            ),
            "siblings with distinct tokens": lambda: (
                len(set(zip(up.tolist(), self.token[1:].tolist(), strict=True))) == len(up)
            ),
            "edge_score <= 0": lambda: bool((self.edge_score <= 0).all()),
            "path_score = parent's + edge_score": lambda: np.array_equal(
                self.path_score[1:], self.path_score[up] + self.edge_score[1:]
            ),
            "uid = hash of the path": lambda: np.array_equal(self.uid[1:], child_uid(self.uid[up], self.token[1:])),
        }
        for rule, holds in rules.items():
            if not holds():
                raise InvariantError("DraftTree", f"a tree of {len(self)} nodes breaks a rule", f"Rule: {rule}.")


def _extended(column: Ints, value: Any, num_new: int) -> Ints:
    """`column` and `num_new` more entries: `value`, a number or an array of them."""
    size = len(column)
    longer = np.empty(size + num_new, np.int64)
    longer[:size], longer[size:] = column, value
    return longer


def _path_scores(known: Floats, parent: Ints, edge_score: Floats) -> Floats:
    """Path scores [N], of which the first are `known` [K]; `parent` and `edge_score` [N] of all nodes."""
    parent, edge_score = parent[len(known) :], edge_score[len(known) :]
    if parent.max(initial=-1) < len(known):  # all others are children of these
        return np.concatenate([known, known[parent] + edge_score])
    paths = known.tolist()
    for above, edge in zip(parent.tolist(), edge_score.tolist(), strict=True):
        paths.append(paths[above] + edge)
    return np.array(paths)


_ZERO, _NONE, _NO_SCORE = np.zeros(1, np.int64), np.full(1, -1), np.zeros(1)  # of a root

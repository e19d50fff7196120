"""The draft tree and the proposals that extend it: immutable values with checked invariants.

A `DraftTree` is a table of nodes held as parallel numpy arrays. Nothing changes a tree in place: `append`, `keep`,
`rescored` and `mark` return new ones, so no plugin can reach back into the tree of another. Because edge scores are
log probabilities (never above zero), the best n nodes by path score always form a tree, and smaller selections are
prefixes of larger ones; pruning, budgets and nested trees all rest on that.
"""

import itertools
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


def child_uid(parent_uid: Any, token: Any) -> Any:
    """Hash of (parent's uid, token): equal paths have equal uids, and siblings never share one.

    Args:
        parent_uid: uint64 array or int.
        token: an array of the same shape, or an int.
    """
    if isinstance(token, np.ndarray):
        token = token.astype(np.uint64)
    # Python's constants serve both: arrays wrap by themselves, ints by the mask. Both multipliers are odd, so that
    # every step can be undone.
    x = ((parent_uid + (token + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 32)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def _column(value: ArrayLike, dtype: Any) -> NDArray[Any]:
    """`value` as a read-only array of `dtype`; an array that is the caller's own is copied first."""
    array = np.asarray(value, dtype=dtype)
    if array.flags.writeable and (array is value or array.base is not None):  # a tensor lends its memory
        array = array.copy()
    return _read_only(array)


def _int16(value: ArrayLike) -> Ints:
    return _column(value, np.int16)


def _int32(value: ArrayLike) -> Ints:
    return _column(value, np.int32)


def _int64(value: ArrayLike) -> Ints:
    return _column(value, np.int64)


def _uint64(value: ArrayLike) -> NDArray[np.uint64]:
    return _column(value, np.uint64)


def _float64(value: ArrayLike) -> Floats:
    return _column(value, np.float64)


def _signals(value: Mapping[str, float]) -> Mapping[str, float]:
    return value if isinstance(value, MappingProxyType) else MappingProxyType(dict(value))


@attrs.frozen(eq=False)
class Expansion:
    """What one call of a drafter proposes: E nodes to attach below a tree's nodes or below each other.

    Attributes:
        anchor: int32 [E]. `a >= 0` attaches to tree row a; `a < 0` to the earlier proposal `~a` of this expansion, so
            that chains and whole subtrees fit in one call.
        token: int64 [E], ids in the target's vocabulary.
        log_prob: float64 [E] (nats), the drafter's log probability of the token given its path; finite and <= 0.
        draft_probs: [E, V] or None, for sampled proposals the distribution each token was drawn from.
        signals: what the drafter can say about this call (match confidence, block entropy, ...), by name.
    """

    anchor: Ints = attrs.field(converter=_int32)
    token: Ints = attrs.field(converter=_int64)
    log_prob: Floats = attrs.field(converter=_float64)
    draft_probs: Any = None
    signals: Mapping[str, float] = attrs.field(factory=dict, converter=_signals)

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

    def scored(self, log_prob: Floats) -> "Expansion":
        """The same proposals with other log probabilities [E]."""
        # Several times faster than attrs.evolve, and called at every step.
        return Expansion(self.anchor, self.token, log_prob, self.draft_probs, self.signals)

    def depths(self, tree: "DraftTree") -> Ints:
        """int [E]: how deep below the root of `tree` each proposal lies."""
        chained = self.chained
        depth = tree.depth[np.maximum(self.anchor, 0) if chained else self.anchor] + 1
        for proposal in chained:
            depth[proposal] = depth[~int(self.anchor[proposal])] + 1
        return depth

    @property
    def chained(self) -> list[int]:
        """The proposals that hang below an earlier one, a link of a chain or part of a subtree."""
        chained: list[int] = (self.anchor < 0).nonzero()[0].tolist()
        return chained

    def __len__(self) -> int:
        return len(self.token)


NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int32),
        ("depth", np.int32),
        ("edge_score", np.float64),
        ("path_score", np.float64),
        ("visited", np.int64),
        ("uid", np.uint64),
        ("draft_row", np.int32),
        ("source", np.int16),
        ("scorer", np.int16),
        ("step", np.int16),
    ],
    align=True,
)
"""A node's record. One array of records, because every step makes new trees: two copies instead of eleven."""


def _nodes(value: NDArray[np.void]) -> NDArray[np.void]:
    return _read_only(value)


@attrs.frozen(eq=False)
class DraftTree:
    """A tree of drafted tokens below the last committed one (N nodes, the root included).

    Row 0 is the root: the last committed token, not yet in the target's cache. Parents come before children. The
    columns below are read-only views of `nodes`.

    Attributes:
        nodes: records [N] of dtype `NODE`.
        draft_probs: [Q, V] or None, distributions that sampled proposals were drawn from.
        num_steps: drafting steps begun so far (each `mark` begins one).
    """

    nodes: NDArray[np.void] = attrs.field(converter=_nodes)
    draft_probs: Any = None
    num_steps: int = 0

    def __attrs_post_init__(self) -> None:
        if DEBUG:
            self.check()

    @classmethod
    def rooted(cls, token: int) -> "DraftTree":
        """The tree of a fresh round: the last committed token alone."""
        nodes = np.zeros(1, NODE)
        for name in ("parent", "draft_row", "source", "scorer", "step"):
            nodes[name] = -1
        nodes["token"] = token
        nodes["uid"] = child_uid(0, int(token))
        return cls(nodes)

    # -- columns ------------------------------------------------------------------------------------------------------

    @property
    def token(self) -> Ints:
        """int64 [N]."""
        return self.nodes["token"]

    @property
    def parent(self) -> Ints:
        """int32 [N], always an earlier row; the root's is -1."""
        return self.nodes["parent"]

    @property
    def depth(self) -> Ints:
        """int32 [N], the root's is 0."""
        return self.nodes["depth"]

    @property
    def edge_score(self) -> Floats:
        """float64 [N], log probability of the token given its path, by the scorer's lights (nats, <= 0); root 0."""
        return self.nodes["edge_score"]

    @property
    def path_score(self) -> Floats:
        """float64 [N], sum of edge scores from the root: the only ranking key."""
        return self.nodes["path_score"]

    @property
    def visited(self) -> Ints:
        """int64 [N], bit s is set when source s has expanded the node."""
        return self.nodes["visited"]

    @property
    def uid(self) -> NDArray[np.uint64]:
        """uint64 [N], a hash of the path: the key for whatever a drafter caches about a node."""
        return self.nodes["uid"]

    @property
    def draft_row(self) -> Ints:
        """int32 [N], row of `draft_probs` that the token was sampled from; -1 for deterministic proposals."""
        return self.nodes["draft_row"]

    @property
    def source(self) -> Ints:
        """int16 [N], index of the source that proposed the node first; the root's is -1."""
        return self.nodes["source"]

    @property
    def scorer(self) -> Ints:
        """int16 [N], index of the source that scored it last; the root's is -1."""
        return self.nodes["scorer"]

    @property
    def step(self) -> Ints:
        """int16 [N], the step that created it; the root's is -1."""
        return self.nodes["step"]

    def __len__(self) -> int:
        return len(self.nodes)

    # -- reading ------------------------------------------------------------------------------------------------------

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
        seen: Bools = (self.visited >> source) & 1 == 1
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
        size, anchor = len(self), expansion.anchor
        uid, depth = self._identify(expansion), expansion.depths(self)
        original = self._originals(anchor, uid)
        is_new = original == np.arange(size, size + len(uid))
        parent = anchor
        if expansion.chained:
            row_of = np.where(original < size, original, size - 1 + np.cumsum(is_new)[np.maximum(original - size, 0)])
            parent = np.where(anchor >= 0, anchor, row_of[np.maximum(~anchor, 0)])

        nodes = np.empty(size + int(is_new.sum()), NODE)
        nodes[:size] = self.nodes
        new = nodes[size:]
        new["token"], new["edge_score"] = expansion.token[is_new], expansion.log_prob[is_new]
        new["parent"], new["depth"], new["uid"] = parent[is_new], depth[is_new], uid[is_new]
        new["source"] = new["scorer"] = source
        new["step"], new["visited"] = max(self.num_steps - 1, 0), 0
        draft_probs = self._draft_rows(expansion, is_new, new)

        known = size  # rows whose path scores stand
        if len(new) < len(uid):
            merged = np.flatnonzero(original < size)
            better = merged[np.asarray(overrules, dtype=np.bool_)[self.scorer[original[merged]]]]
            rows, edges = original[better], expansion.log_prob[better]
            if (nodes["edge_score"][rows] != edges).any():
                # Reversed, so that the first of several equal proposals is the one that counts.
                nodes["edge_score"][rows[::-1]] = edges[::-1]
                known = 1
            nodes["scorer"][rows] = source
        _score_paths(nodes, known)
        return DraftTree(nodes, draft_probs, self.num_steps)

    def keep(self, mask: Bools) -> "DraftTree":
        """The nodes where `mask` [N] is True, which must be ancestor-closed and hold the root.

        Raises:
            InvariantError: the mask drops the root, or keeps a node whose parent it drops.
        """
        mask = np.asarray(mask, dtype=np.bool_)
        if mask.shape != (len(self),) or not mask[0] or not mask[self.parent[1:]][mask[1:]].all():
            raise InvariantError(
                "DraftTree.keep", f"a mask of shape {mask.shape} that is not ancestor-closed",
                f"Allowed: bool [{len(self)}] that holds the root and the parent of every node it holds.",
            )  # fmt: skip
        nodes = self.nodes[mask]
        nodes["parent"][1:] = (np.cumsum(mask) - 1)[nodes["parent"][1:]]
        return DraftTree(nodes, self.draft_probs, self.num_steps)

    def rescored(self, rows: Ints, log_prob: Floats, source: int, overrules: Sequence[bool] | Bools) -> "DraftTree":
        """Give `rows` [R] new edge scores `log_prob` [R]; path scores are recomputed from the root down.

        The root is left alone, and so are nodes last scored by a source that `overrules` does not name.
        """
        rows = np.asarray(rows, dtype=np.int64)
        allowed = (rows > 0) & np.asarray(overrules, dtype=np.bool_)[self.scorer[rows]]
        if not allowed.any():
            return self
        nodes = self.nodes.copy()
        rows = rows[allowed]
        nodes["edge_score"][rows] = log_prob[allowed]
        nodes["scorer"][rows] = source
        _score_paths(nodes, 1, int(nodes["depth"][rows].min()))
        return DraftTree(nodes, self.draft_probs, self.num_steps)

    def mark(self, rows: Ints, source: int) -> "DraftTree":
        """Begin a drafting step: record that `source` expands `rows` [P]."""
        nodes = self.nodes.copy()
        nodes["visited"][rows] |= np.int64(1) << np.int64(source)
        return DraftTree(nodes, self.draft_probs, self.num_steps + 1)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _identify(self, expansion: Expansion) -> NDArray[np.uint64]:
        """uids [E] of the proposals."""
        anchor, token, chained = expansion.anchor, expansion.token, expansion.chained
        if anchor.max() >= len(self) or (chained and (~anchor[chained] >= chained).any()):
            raise InvariantError(
                "Expansion.anchor", f"{anchor.tolist()} for a tree of {len(self)} nodes",
                "Allowed: a row of the tree, or ~i for the earlier proposal i.",
            )  # fmt: skip
        uid: NDArray[np.uint64] = child_uid(self.uid[np.maximum(anchor, 0) if chained else anchor], token)
        for proposal in chained:
            above = ~int(anchor[proposal])
            uid[proposal] = child_uid(int(uid[above]), int(token[proposal]))
        return uid

    def _originals(self, anchor: Ints, uid: NDArray[np.uint64]) -> Ints:
        """[E] the first row, or `N +` the first proposal, with the same path as each proposal."""
        size = len(self)
        rows: Ints = np.arange(size)
        if anchor.min() >= 0:  # no chains: only children of the anchors can be repeated
            anchored = np.zeros(size, np.bool_)
            anchored[anchor] = True
            rows = np.flatnonzero(anchored[self.parent[1:]]) + 1
        paths = uid.tolist()
        if not len(rows) and len(set(paths)) == len(paths):
            return np.arange(size, size + len(paths))
        first = dict(zip(self.uid[rows].tolist(), rows.tolist(), strict=True))
        return np.array([first.setdefault(path, size + index) for index, path in enumerate(paths)])

    def _draft_rows(self, expansion: Expansion, is_new: Bools, new: NDArray[np.void]) -> Any:
        """Note in `new` which distribution each node was drawn from; returns all distributions."""
        new["draft_row"] = -1
        if expansion.draft_probs is None:
            return self.draft_probs
        probs = np.asarray(expansion.draft_probs)[is_new]
        have = 0 if self.draft_probs is None else len(self.draft_probs)
        new["draft_row"] = np.arange(have, have + len(new))
        return _read_only(probs if self.draft_probs is None else np.concatenate([self.draft_probs, probs]))

    def check(self) -> None:
        """Verify every invariant in the class's docstring.

        Raises:
            InvariantError: naming the first that does not hold.
        """
        kids, up = np.arange(1, len(self)), self.parent[1:]
        # In this order: a rule may rely on those before it.
        rules: dict[str, Callable[[], bool]] = {
            "read-only": lambda: not self.nodes.flags.writeable,
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


def _score_paths(nodes: NDArray[np.void], start: int, top: int = 1) -> None:
    """Write the path scores of all nodes from row `start` and depth `top` on, level by level; others hold theirs."""
    parent, depth, edge, path = (nodes[name] for name in ("parent", "depth", "edge_score", "path_score"))
    if start == len(nodes) or parent[start:].max() < start:  # one level of new nodes
        path[start:] = path[parent[start:]] + edge[start:]
        return
    order = np.argsort(depth[start:], kind="stable") + start
    ends = np.cumsum(np.bincount(depth[start:])).tolist()
    for begin, end in itertools.pairwise(ends[top - 1 :]):
        rows = order[begin:end]
        path[rows] = path[parent[rows]] + edge[rows]

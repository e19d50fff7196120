"""The draft tree and the proposals that extend it: immutable values with checked invariants.

A `DraftTree` is a table of nodes held as parallel numpy arrays. Nothing changes a tree in place: `append`, `keep`,
`rescored` and `mark` return new ones, so no plugin can reach back into the tree of another. Because edge scores are
log probabilities (never above zero), the best n nodes by path score always form a tree, and smaller selections are
prefixes of larger ones; pruning, budgets and nested trees all rest on that.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from treegraft.errors import InvariantError

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Read at call time, so that a test or a debugging session can switch the checks on without reimporting.
DEBUG_VARIABLE = "TREEGRAFT_DEBUG"

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31))


def child_uid(parent_uid: NDArray[np.uint64], token: Ints) -> NDArray[np.uint64]:
    """Hash of (parent's uid, token), elementwise: equal paths have equal uids (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        x = parent_uid + (token.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> _SHIFTS[0])) * _MIX_1
        x = (x ^ (x >> _SHIFTS[1])) * _MIX_2
        uid: NDArray[np.uint64] = x ^ (x >> _SHIFTS[2])
        return uid


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
    return dict(value)


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

    def __len__(self) -> int:
        return len(self.token)


@attrs.frozen(eq=False)
class DraftTree:
    """A tree of drafted tokens below the last committed one (N nodes, the root included).

    Attributes:
        token: int64 [N]. Row 0 is the root: the last committed token, not yet in the target's cache.
        parent: int32 [N], always an earlier row; the root's is -1.
        depth: int32 [N], the root's is 0.
        edge_score: float64 [N], log probability of the token given its path, by the scorer's lights (nats, <= 0).
        path_score: float64 [N], sum of edge scores from the root: the only ranking key.
        source: int16 [N], index of the source that proposed the node first; the root's is -1.
        scorer: int16 [N], index of the source that scored it last; the root's is -1.
        step: int16 [N], the drafting step that created it; the root's is -1.
        visited: int64 [N], bit s is set when source s has expanded the node.
        uid: uint64 [N], a hash of the path: the key for whatever a drafter caches about a node.
        draft_row: int32 [N], row of `draft_probs` the token was sampled from; -1 for deterministic proposals.
        draft_probs: [Q, V] or None.
        num_steps: drafting steps begun so far (each `mark` begins one).
    """

    token: Ints = attrs.field(converter=_int64)
    parent: Ints = attrs.field(converter=_int32)
    depth: Ints = attrs.field(converter=_int32)
    edge_score: Floats = attrs.field(converter=_float64)
    path_score: Floats = attrs.field(converter=_float64)
    source: Ints = attrs.field(converter=_int16)
    scorer: Ints = attrs.field(converter=_int16)
    step: Ints = attrs.field(converter=_int16)
    visited: Ints = attrs.field(converter=_int64)
    uid: NDArray[np.uint64] = attrs.field(converter=_uint64)
    draft_row: Ints = attrs.field(converter=_int32)
    draft_probs: Any = None
    num_steps: int = 0

    def __attrs_post_init__(self) -> None:
        if os.environ.get(DEBUG_VARIABLE):
            self.check()

    @classmethod
    def rooted(cls, token: int) -> "DraftTree":
        """The tree of a fresh round: the last committed token alone."""
        return cls(
            token=[token], parent=[-1], depth=[0], edge_score=[0.0], path_score=[0.0], source=[-1], scorer=[-1],
            step=[-1], visited=[0], uid=child_uid(np.zeros(1, np.uint64), np.array([token])), draft_row=[-1],
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.token)

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
        size = len(self)
        uid, depth = self._identify(expansion)
        _, first, inverse = np.unique(np.concatenate([self.uid, uid]), return_index=True, return_inverse=True)
        original = first[inverse[size:]]  # [E] the first row or proposal with the same path
        is_new = original == np.arange(size, size + len(uid))
        row_of = original.copy()
        row_of[is_new] = size + np.arange(int(is_new.sum()))
        repeated = original >= size
        row_of[repeated] = row_of[original[repeated] - size]

        anchor = expansion.anchor
        parent = np.where(anchor >= 0, anchor, row_of[np.where(anchor < 0, ~anchor, 0)])
        num_new = int(is_new.sum())
        edge = np.concatenate([self.edge_score, expansion.log_prob[is_new]])
        scorer = np.concatenate([self.scorer, np.full(num_new, source, np.int16)])
        parents = np.concatenate([self.parent, parent[is_new]])

        merged = np.flatnonzero(original < size)
        rows = original[merged]
        better = np.asarray(overrules, dtype=np.bool_)[self.scorer[rows]] if len(rows) else np.zeros(0, np.bool_)
        # Reversed, so that the first of several equal proposals is the one that counts.
        edge[rows[better][::-1]] = expansion.log_prob[merged[better][::-1]]
        scorer[rows[better]] = source

        return attrs.evolve(
            self,
            token=np.concatenate([self.token, expansion.token[is_new]]),
            parent=parents,
            depth=np.concatenate([self.depth, depth[is_new]]),
            edge_score=edge,
            path_score=_path_scores(parents, edge, self.path_score[:1] if better.any() else self.path_score),
            source=np.concatenate([self.source, np.full(num_new, source, np.int16)]),
            scorer=scorer,
            step=np.concatenate([self.step, np.full(num_new, max(self.num_steps - 1, 0), np.int16)]),
            visited=np.concatenate([self.visited, np.zeros(num_new, np.int64)]),
            uid=np.concatenate([self.uid, uid[is_new]]),
            **self._draft_rows(expansion, is_new),
        )

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
        new_row = np.cumsum(mask) - 1
        parent = self.parent[mask]
        columns = {name: getattr(self, name)[mask] for name in _COLUMNS if name != "parent"}
        return attrs.evolve(self, parent=np.where(parent < 0, -1, new_row[parent]), **columns)

    def rescored(self, rows: Ints, log_prob: Floats, source: int, overrules: Sequence[bool] | Bools) -> "DraftTree":
        """Give `rows` [R] new edge scores `log_prob` [R]; path scores are recomputed from the root down.

        The root is left alone, and so are nodes last scored by a source that `overrules` does not name.
        """
        rows = np.asarray(rows, dtype=np.int64)
        allowed = (rows > 0) & np.asarray(overrules, dtype=np.bool_)[self.scorer[rows]]
        if not allowed.any():
            return self
        edge, scorer = self.edge_score.copy(), self.scorer.copy()
        edge[rows[allowed]] = log_prob[allowed]
        scorer[rows[allowed]] = source
        path_score = _path_scores(self.parent, edge, self.path_score[:1])
        return attrs.evolve(self, edge_score=edge, scorer=scorer, path_score=path_score)

    def mark(self, rows: Ints, source: int) -> "DraftTree":
        """Begin a drafting step: record that `source` expands `rows` [P]."""
        visited = self.visited.copy()
        visited[rows] |= np.int64(1) << np.int64(source)
        return attrs.evolve(self, visited=visited, num_steps=self.num_steps + 1)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _identify(self, expansion: Expansion) -> tuple[NDArray[np.uint64], Ints]:
        """uids and depths [E] of the proposals."""
        anchor, token = expansion.anchor, expansion.token
        if ((anchor >= len(self)) | (~anchor >= np.arange(len(anchor)))).any():
            raise InvariantError(
                "Expansion.anchor", f"{anchor.tolist()} for a tree of {len(self)} nodes",
                "Allowed: a row of the tree, or ~i for the earlier proposal i.",
            )  # fmt: skip
        ready = anchor >= 0
        at = np.where(ready, anchor, 0)
        uid = child_uid(self.uid[at], token)
        depth = self.depth[at] + 1
        while not ready.all():
            # One pass a level: proposals whose anchor is known by now.
            due = np.flatnonzero(~ready)
            due = due[ready[~anchor[due]]]
            uid[due] = child_uid(uid[~anchor[due]], token[due])
            depth[due] = depth[~anchor[due]] + 1
            ready[due] = True
        return uid, depth

    def _draft_rows(self, expansion: Expansion, is_new: Bools) -> dict[str, Any]:
        num_new = int(is_new.sum())
        if expansion.draft_probs is None:
            return {"draft_row": np.concatenate([self.draft_row, np.full(num_new, -1, np.int32)])}
        probs = np.asarray(expansion.draft_probs)[is_new]
        have = 0 if self.draft_probs is None else len(self.draft_probs)
        stacked = probs if self.draft_probs is None else np.concatenate([self.draft_probs, probs])
        rows = np.arange(have, have + num_new, dtype=np.int32)
        return {"draft_row": np.concatenate([self.draft_row, rows]), "draft_probs": _read_only(stacked)}

    def check(self) -> None:
        """Verify every invariant in the class's docstring.

        Raises:
            InvariantError: naming the first that does not hold.
        """
        columns = [getattr(self, name) for name in _COLUMNS]
        kids, up = np.arange(1, len(self)), self.parent[1:]
        # In this order: a rule may rely on those before it.
        rules: dict[str, Callable[[], bool]] = {
            "columns of one length": lambda: len({len(column) for column in columns}) == 1,
            "read-only columns": lambda: not any(column.flags.writeable for column in columns),
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


_COLUMNS = tuple(
    field.name for field in attrs.fields(DraftTree) if field.name not in {"draft_probs", "num_steps"}
)  # fmt: skip


def _path_scores(parent: Ints, edge: Floats, known: Floats) -> Floats:
    """Path scores [N], given those of the first rows."""
    start = len(known)
    above = parent[start:]
    if not len(above) or above.max() < start:  # one level of new nodes
        return np.concatenate([known, known[above] + edge[start:]])
    scores = known.tolist()
    # A loop over floats: the fastest order that is exact, for trees of up to a thousand nodes.
    for up, score in zip(above.tolist(), edge[start:].tolist(), strict=True):
        scores.append(scores[up] + score)
    return np.array(scores, dtype=np.float64)

"""Toy drafters: one that reads a table, one that follows a script, one that breaks the rules."""

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import attrs
import numpy as np
import torch

from treegraft.errors import ModelError
from treegraft.interfaces import Drafter, DraftRequest, Rescoring
from treegraft.testing.models import table_row
from treegraft.tree import DraftTree, Expansion, Floats, Ints

Fault = Literal[
    "raises", "none", "empty", "nan", "positive", "vocabulary", "negative", "anchor", "loop", "deep", "crowded",
    "siblings", "writes",
]  # fmt: skip


def _log_probs(table: Floats, context: Ints) -> Floats:
    logits = torch.from_numpy(table_row(table, context).copy())
    log_probs: Floats = logits.log_softmax(-1).numpy()
    return log_probs


@attrs.define(eq=False)
class TableDrafter(Drafter):
    """Drafts the most probable tokens of a table of logits, as `MarkovTarget` reads one, and rescores with it.

    Args:
        table: logits [V] * order + [V]. The target's own table makes it as good a drafter as there is.
        max_length: positions it can process, or None.
    """

    rescores: ClassVar[bool] = True

    table: Floats
    max_length: int | None = None

    def draft(self, request: DraftRequest) -> Expansion:
        self.num_rows = len(request.positions)
        rows: dict[int, list[tuple[int, float]]] = {}
        for row in request.positions.tolist():
            if request.tree.depth[row] < request.max_depth:
                log_probs = _log_probs(self.table, request.context(row))
                best = np.argsort(-log_probs, kind="stable")[: request.branching]
                rows[row] = [(int(t), float(log_probs[t])) for t in best if np.isfinite(log_probs[t])]
        return _first(Expansion.from_rows(rows), request.max_nodes)

    def rescore(self, tree: DraftTree, candidates: Ints, request: DraftRequest) -> Rescoring:
        closed = sorted({row for candidate in candidates.tolist() for row in tree.path(candidate)} - {0})
        self.num_rows = len(closed)
        # A token that the table rules out keeps a finite score, as rule D4 asks of every log probability.
        log_prob = [
            max(float(_log_probs(self.table, request.context(row)[:-1])[tree.token[row]]), -1e3) for row in closed
        ]
        return Rescoring(np.array(closed, np.int64), np.array(log_prob, np.float64), candidates)


@attrs.define(eq=False)
class ScriptedDrafter(Drafter):
    """Drafts from a reference text: below a path that follows it, the next token among wrong ones; elsewhere nothing.

    Args:
        reference: the token ids it believes in, prompt included.
        num_right: how many tokens a path may follow the reference; deeper, the right token is left out. None for
            any number, 0 for a drafter that always lies.
        rank: wrong siblings that it prefers to the right token, which becomes child number `rank`.
        max_length: positions it can process, or None.
    """

    reference: Sequence[int]
    num_right: int | None = None
    rank: int = 0
    max_length: int | None = None

    def draft(self, request: DraftRequest) -> Expansion:
        rows = {
            row: self._children(request, row)
            for row in request.positions.tolist()
            if request.tree.depth[row] < request.max_depth
        }
        return _first(Expansion.from_rows(rows), request.max_nodes)

    def _children(self, request: DraftRequest, row: int) -> list[tuple[int, float]]:
        context = request.context(row).tolist()
        if len(context) >= len(self.reference) or context != list(self.reference[: len(context)]):
            return []
        right = self.reference[len(context)]
        tokens = [token for token in range(min(request.vocab_size, request.branching + 1)) if token != right]
        if self.num_right is None or request.tree.depth[row] < self.num_right:
            tokens.insert(self.rank, right)
        return [(token, -0.1 * (place + 1)) for place, token in enumerate(tokens[: request.branching])]


@attrs.define(eq=False)
class FaultyDrafter(Drafter):
    """Drafts token 0 everywhere, and breaks a rule once it has been called `healthy_calls` times in a request.

    Args:
        fault: it raises; it returns None, or an empty expansion (which is no fault); log probabilities that are nan or
            positive; tokens beyond the vocabulary, or negative; an anchor out of range; a loop of proposals below
            themselves; a chain too deep; too many proposals below one node; siblings that carry the same token; it
            writes into the tree.
        healthy_calls: calls of `draft` in a request before the fault.
    """

    fault: Fault = attrs.field(validator=attrs.validators.in_(get_args(Fault)))
    healthy_calls: int = 0
    num_calls: int = attrs.field(init=False, default=0)

    def start(self, observation: object) -> None:
        self.num_calls = 0

    def draft(self, request: DraftRequest) -> Expansion:
        self.num_calls += 1
        healthy = Expansion.from_rows({row: [(0, -0.5)] for row in request.positions.tolist()})
        if self.num_calls <= self.healthy_calls:
            return healthy
        size = len(healthy)
        match self.fault:
            case "raises":
                raise ModelError("FaultyDrafter", "asked to draft")
            case "nan":
                return attrs.evolve(healthy, log_prob=np.full(size, np.nan))
            case "positive":
                return attrs.evolve(healthy, log_prob=np.full(size, 0.5))
            case "none":
                return None  # type: ignore[return-value]
            case "empty":
                return Expansion.empty()
            case "vocabulary":
                return attrs.evolve(healthy, token=np.full(size, request.vocab_size))
            case "negative":
                return attrs.evolve(healthy, token=np.full(size, -1))
            case "anchor":
                return attrs.evolve(healthy, anchor=np.full(size, len(request.tree)))
            case "loop":
                return attrs.evolve(healthy, anchor=~np.arange(size))
            case "deep":
                length = request.max_depth + 1
                return Expansion([request.positions[0], *~np.arange(length - 1)], [0] * length, [-0.5] * length)
            case "crowded":
                below = [(token, -0.5) for token in range(request.branching + 1)]
                return Expansion.from_rows(dict.fromkeys(request.positions.tolist(), below))
            case "siblings":
                return Expansion.from_rows({row: [(0, -0.5), (0, -0.6)] for row in request.positions.tolist()})
            case "writes":
                request.tree.token[0] = 0
                return healthy


def _first(expansion: Expansion, max_nodes: int) -> Expansion:
    """The first `max_nodes` proposals."""
    return Expansion(expansion.anchor[:max_nodes], expansion.token[:max_nodes], expansion.log_prob[:max_nodes])

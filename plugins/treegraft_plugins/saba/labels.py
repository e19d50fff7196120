"""Labels for every budget from one large tree a round, along text that is decoded once.

Trees are nested: the best B nodes of a large tree are the tree of budget B. So rounds that grow the largest tree are
labelled for all budgets at once. How many nodes a round then verifies is drawn at random from the budgets, so that what
was accepted lately, which the model reads, is what many policies would have left behind.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.errors import RequestError
from treegraft.interfaces import BudgetPolicy, RoundState
from treegraft.pipeline import Pipeline
from treegraft.replay.recording import Recording, reference_path, replay
from treegraft.statistics import CostModel
from treegraft.tree import DraftTree, Floats, Ints
from treegraft_plugins.budgets import expected_accepted
from treegraft_plugins.collection import Arrays
from treegraft_plugins.saba.signals import SIGNALS, state_signals

MAX_RANKS = 64
"""Accepted nodes of one tree that are recorded; longer paths are cut."""


@attrs.define(eq=False)
class LabellingBudget(BudgetPolicy):
    """Grows trees of B nodes, verifies as many as chance says, and keeps what a state-aware budget would have seen.

    Args:
        verify_nodes: B.
        budgets: int [G], to draw from.
        rng: draws.

    Attributes:
        seen: by position, the signals before the choice.
    """

    max_verify_nodes: int = attrs.field(alias="verify_nodes")
    budgets: Ints
    rng: np.random.Generator
    seen: dict[int, Floats] = attrs.field(init=False, factory=dict)

    def max_nodes(self, state: RoundState) -> int:
        return self.max_verify_nodes

    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        self.seen[state.position] = state_signals(state, tree, SIGNALS)
        return int(self.rng.choice(self.budgets))


@attrs.frozen(eq=False)
class Labels:
    """N rounds in which something was drafted, D steps each, B the most nodes.

    Attributes:
        text: int64 [N], which text a round belongs to.
        position: int64 [N], committed tokens.
        left: int64 [N], tokens until the text ends.
        signals: float32 [N, S], in the order of `SIGNALS`, NaN where one is missing.
        num_nodes: int64 [N], non-root nodes of the tree.
        ranks: int64 [N, MAX_RANKS], the ranks by path score (1 is the best node below the root) of the nodes that the
            text follows, from the top; 0 beyond the last.
        expected: float32 [N, B + 1], draft tokens that the tree's scores expect of its best nodes.
        source, rows: int64 [N, D], index of the source that drafted in each step, -1 for none, and rows it forwarded.
    """

    text: Ints
    position: Ints
    left: Ints
    signals: NDArray[np.float32]
    num_nodes: Ints
    ranks: Ints
    expected: NDArray[np.float32]
    source: Ints
    rows: Ints

    def __len__(self) -> int:
        return len(self.text)

    def take(self, index: Any) -> "Labels":
        """The rounds of `index`."""
        return attrs.evolve(self, **{name: getattr(self, name)[index] for name in COLUMNS})

    @classmethod
    def joined(cls, parts: Sequence[Arrays]) -> "Labels":
        """Of the parts that `labelled` made, a text each.

        Raises:
            RequestError: there are no rounds.
        """
        if not any(len(part["position"]) for part in parts):
            raise RequestError("--prompts", "texts in which nothing was drafted", "Allowed: longer ones.")
        kept = [(number, part) for number, part in enumerate(parts) if len(part["position"])]
        columns = {name: np.concatenate([part[name] for _, part in kept]) for name in COLUMNS[1:]}
        text = np.concatenate([np.full(len(part["position"]), number) for number, part in kept])
        single = {"signals", "expected"}
        return cls(
            text, **{name: array.astype(np.float32 if name in single else np.int64) for name, array in columns.items()}
        )  # fmt: skip

    def accepted(self, nodes: Ints) -> Ints:
        """int64 [N, ...]: draft tokens kept where the best `nodes` [N, ...] are verified."""
        ranks = self.ranks.reshape(len(self), *(1,) * (np.ndim(nodes) - 1), -1)
        kept: Ints = ((ranks > 0) & (ranks <= np.asarray(nodes)[..., None])).sum(-1)
        return kept

    def expecting(self, nodes: Ints) -> Floats:
        """float64 [N, G]: draft tokens that the trees' scores expect of the best `nodes` [N, G]."""
        return np.take_along_axis(self.expected, nodes, axis=1).astype(np.float64)

    def emitted(self, nodes: Ints) -> Ints:
        """int64 [N, ...]: tokens that those rounds emit."""
        left = self.left.reshape(-1, *(1,) * (np.ndim(nodes) - 1))
        return np.minimum(self.accepted(nodes) + 1, left)

    def ms(self, costs: CostModel, sources: Sequence[str], nodes: Ints) -> Floats:
        """float64 [N, ...]: modelled latency (ms) of those rounds, by the names of the sources."""
        drafting = np.zeros(self.rows.shape)
        for index, name in enumerate(sources):
            own = self.source == index
            drafting[own] = costs.source_ms(name, self.rows[own])
        target = [
            costs.target_ms(count + 1, int(position)) for count, position in zip(nodes, self.position, strict=True)
        ]
        total: Floats = np.array(target) + drafting.sum(-1).reshape(-1, *(1,) * (np.ndim(nodes) - 1))
        return total


COLUMNS = tuple(field.name for field in attrs.fields(Labels))


def labelled(pipeline: Pipeline, recording: Recording, budgets: Ints, rng: np.random.Generator) -> Arrays:
    """The labels of one text, as the columns of `Labels` but `text`.

    Args:
        pipeline: loaded with a ReplayTarget and fixed costs; its budget policy gives B and is not used else.
        recording: the text.
        budgets: int [G], how many nodes rounds verify, at random.
        rng: what is random.

    Raises:
        RequestError: a drafter failed, or the pipeline cannot be replayed.
    """
    own, steps = pipeline.parts, pipeline.parts.steps
    policy = LabellingBudget(own.budget.max_verify_nodes, budgets, rng)
    pipeline.parts = attrs.evolve(own, budget=policy)
    try:
        generation = replay(pipeline, recording)
    finally:
        pipeline.parts = own
    if generation.faults:
        raise RequestError(f"sources.{generation.faults[0]['source']}", generation.faults[0]["error"])
    index = {source.name: number for number, source in enumerate(pipeline.sources)}
    rounds = [done.state for done in generation.rounds or () if done.state.position in policy.seen]
    size, most = len(rounds), policy.max_verify_nodes
    found: Arrays = {
        "position": np.array([state.position for state in rounds], np.int64),
        "left": np.array([len(recording.text) - 1 - state.position for state in rounds], np.int64),
        "signals": np.array([policy.seen[state.position] for state in rounds]).reshape(size, len(SIGNALS)),
        "num_nodes": np.array([len(state.tree) - 1 for state in rounds], np.int64),
        "ranks": np.zeros((size, MAX_RANKS), np.int64),
        "expected": np.zeros((size, most + 1)),
        "source": np.full((size, steps), -1),
        "rows": np.zeros((size, steps), np.int64),
    }
    for number, state in enumerate(rounds):
        ranks = reference_ranks(state.tree, recording.text[state.position + 1 :])[:MAX_RANKS]
        found["ranks"][number, : len(ranks)] = ranks
        expected = expected_accepted(state.tree, most)
        found["expected"][number] = expected[np.minimum(np.arange(most + 1), len(expected) - 1)]
        for place, step in enumerate(state.steps):
            if len(step.positions):
                found["source"][number, place] = index[step.source]
                found["rows"][number, place] = step.num_rows
    return found


def reference_ranks(tree: DraftTree, tokens: Ints) -> Ints:
    """int64 [A]: the ranks by path score, the root's being 0, of the nodes that follow `tokens` as far as they go."""
    rank = np.empty(len(tree), np.int64)
    rank[tree.ranked()] = np.arange(len(tree))
    return rank[reference_path(tree, tokens)]
